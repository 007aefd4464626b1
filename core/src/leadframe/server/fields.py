"""Types of request fields. Every integer, string and list that a client sends is bounded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.types import FailFast
from pydantic_core import PydanticCustomError

MAX_N = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_BAD_WORDS = 128
INT32 = 2**31 - 1
INT64 = 2**63 - 1

Prompt = str | list[int]
"""One prompt: text, or token ids."""


class FirstError(FailFast):
    """Ends the validation of a list at its first error. Unlike its base it can join a union."""

    __hash__ = object.__hash__


TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], FirstError()]
Count = Annotated[int, Field(ge=0, le=INT32)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Name = Annotated[str, Field(max_length=256)]


def bad(message: str, param: str | None = None) -> PydanticCustomError:
    """Returns the error that a validator raises; braces in the message are literal.

    Args:
      message: what is wrong, after the name of the field.
      param: the field at fault, where it is not the one that is validated.
    """
    return PydanticCustomError("bad_value", "{message}", {"message": message, "param": param})


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= INT32


def _read_prompts(value: Any) -> list[Prompt]:
    """Turns OpenAI's four forms of `prompt` into a list of prompts, in one pass."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad("must be a string, a list of strings, a list of token ids or a list of those")
    if all(map(_is_token, value)):
        return [value]
    if all(type(item) is int for item in value):
        raise bad(f"holds a token id outside [0, {INT32}]")
    if len(value) > MAX_PROMPTS:
        raise bad(f"has {len(value)} entries; at most {MAX_PROMPTS} prompts fit one request")
    for index, item in enumerate(value):
        is_ids = isinstance(item, list) and all(map(_is_token, item))
        if type(item) is not type(value[0]) or not (isinstance(item, str) or is_ids):
            raise bad(
                f"entry {index} is not like the first, or not a prompt; give only strings, only "
                f"token ids in [0, {INT32}], or only lists of those ids"
            )
    return value


def _read_stop(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if values is None:
        return []
    if not isinstance(values, list) or len(values) > 16:
        raise bad("must be a string or a list of at most 16 strings")
    if any(not isinstance(item, str) or not 0 < len(item) <= 1024 for item in values):
        raise bad("must hold strings of 1 to 1024 characters")
    return values


def _read_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 1024:
        raise bad("must be an object of at most 1024 token ids")
    return {_bias_key(key): _bias_value(bias) for key, bias in value.items()}


def _bias_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= INT32):
        raise bad(f"has the key {key[:32]!r}; keys are token ids in [0, {INT32}]")
    return int(key)


def _bias_value(value: Any) -> float:
    if type(value) not in (int, float) or not -100 <= value <= 100:
        raise bad("has a value that is not a number in [-100, 100]")
    return float(value)


def _schema(kind: dict[str, Any], reader: Callable[[Any], Any]) -> tuple[Any, Any]:
    return BeforeValidator(reader), WithJsonSchema(kind)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}}

Prompts = Annotated[
    list[Any],
    *_schema(
        {"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]},
        _read_prompts,
    ),
]
Stop = Annotated[list[str], *_schema({"anyOf": [{"type": "string"}, _STRINGS]}, _read_stop)]
LogitBias = Annotated[
    dict[int, float],
    *_schema({"type": "object", "additionalProperties": {"type": "number"}}, _read_logit_bias),
]
