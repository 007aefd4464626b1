"""`response_format` and `structured_outputs` → what the text of an output must match."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, WithJsonSchema

from leadframe.errors import RequestError
from leadframe.server.fields import bad
from leadframe.structured_outputs import KINDS, StructuredOutputs

_SCHEMA_FIELDS = {"name": str, "schema": dict, "strict": bool, "description": str}


def _read_structured_outputs(value: Any) -> StructuredOutputs | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad(f"must be an object with one of {', '.join(KINDS)}")
    return _checked("structured_outputs", value)


def _read_response_format(value: Any) -> StructuredOutputs | None:
    """Reads OpenAI's forms: text, any JSON object, or JSON that follows a schema."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return _checked("response_format", {"json_object": True})
    if kind != "json_schema" or set(value) != {"type", "json_schema"}:
        raise bad(
            'must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        )
    return _checked("response_format", {"json": _read_json_schema(value["json_schema"])})


def _read_json_schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise bad("has a json_schema that is not an object with name and schema")
    for name, item in value.items():
        kind = _SCHEMA_FIELDS.get(name)
        if kind is None:
            known = ", ".join(_SCHEMA_FIELDS)
            raise bad(f"has a json_schema with {name[:64]!r}; it takes {known}")
        if item is not None and not isinstance(item, kind):
            raise bad(f"has a json_schema whose {name} is not of type {kind.__name__}")
    missing = [name for name in ("name", "schema") if value.get(name) is None]
    if missing:
        raise bad(f"has a json_schema without {' and '.join(missing)}")
    return value["schema"]


def _checked(param: str, fields: dict[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs.from_mapping(fields, param)
    except RequestError as error:
        raise bad(str(error).removeprefix(f"{param} ")) from None


_TEXT = {"type": "string"}

StructuredField = Annotated[
    InstanceOf[StructuredOutputs] | None,
    BeforeValidator(_read_structured_outputs),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [{"type": "object"}, _TEXT]},
                "regex": _TEXT,
                "choice": {"type": "array", "items": _TEXT},
                "grammar": _TEXT,
                "json_object": {"type": "boolean"},
            },
        }
    ),
]
ResponseFormat = Annotated[
    InstanceOf[StructuredOutputs] | None,
    BeforeValidator(_read_response_format),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _TEXT, "schema": {"type": "object"}},
                },
            },
        }
    ),
]
