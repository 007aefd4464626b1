"""What the text of an output must match: a JSON schema, a regex, a choice or a grammar.

Only what can be checked without a tokenizer is checked here; `leadframe.grammar` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from leadframe.errors import RequestError

MAX_CONSTRAINT_BYTES: Final = 64 << 10
MAX_CHOICES: Final = 1024
MAX_NESTING: Final = 64
"""Objects and lists inside each other in a JSON schema."""

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one constraint on the text of an output.

    Attributes:
      json: a JSON schema, as an object or as its text.
      regex: the whole text matches it; no look-around, no back-references.
      choice: the text is one of these strings.
      grammar: the text is derived from `start` of a Lark grammar.
      json_object: True for any JSON object.
      param: the request field that errors name.
      kind: which constraint it is; any object counts as "json".
      text: the constraint as text: a schema, a regex, a JSON list of choices, a Lark grammar.

    Raises:
      RequestError: none or several are given, or the one that is given is malformed.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    param: str = field(default="structured_outputs", compare=False, repr=False)
    kind: Kind = field(init=False, compare=False, repr=False)
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Checks and normalises the constraint."""
        names = [*KINDS, "json_object"]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            shown = " and ".join(given) or "no constraint"
            raise self._bad(f"has {shown}; give exactly one of {', '.join(names)}")
        if given == ["json_object"]:
            if self.json_object is not True:
                raise self._bad("has json_object without the value true; leave it out")
            kind: Kind = "json"
            text = '{"type":"object"}'
        else:
            kind = next(name for name in KINDS if name == given[0])
            text = getattr(self, f"_read_{kind}")(getattr(self, kind))
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", self._bounded(text))

    @classmethod
    def from_mapping(
        cls, value: Mapping[str, Any], param: str = "structured_outputs"
    ) -> StructuredOutputs:
        """Builds it from field names and values.

        Raises:
          RequestError: a name is unknown, or what the class raises.
        """
        known = [*KINDS, "json_object"]
        unknown = [_shown(name) for name in value if name not in known]
        if unknown:
            raise RequestError(
                f"{param} has {unknown[0]}; it takes one of {', '.join(known)}", param=param
            )
        return cls(**value, param=param)

    def _read_json(self, value: object) -> str:
        schema = value
        if isinstance(value, str):
            try:
                schema = json.loads(self._bounded(value))
            except (ValueError, RecursionError) as error:
                raise self._bad(f"has a json that is not JSON text: {str(error)[:100]}") from None
        if not isinstance(schema, Mapping):
            raise self._bad("has a json that is not a JSON schema: it must be an object")
        if _depth(schema) > MAX_NESTING:
            raise self._bad(f"has a json that is nested over {MAX_NESTING} levels deep")
        try:
            return json.dumps(schema, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise self._bad(f"has a json that is not JSON: {str(error)[:100]}") from None

    def _read_regex(self, value: object) -> str:
        return self._text("regex", value)

    def _read_grammar(self, value: object) -> str:
        return self._text("grammar", value)

    def _read_choice(self, value: object) -> str:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not is_list or not 1 <= len(value) <= MAX_CHOICES:  # type: ignore[arg-type]
            raise self._bad(f"has a choice that is not a list of 1 to {MAX_CHOICES} strings")
        return json.dumps([self._text("choice", one) for one in value])  # type: ignore[attr-defined]

    def _text(self, name: str, value: object) -> str:
        is_text = isinstance(value, str) and value
        if not is_text or any("\ud800" <= char <= "\udfff" for char in str(value)):
            raise self._bad(f"has a {name} that is not a non-empty text of valid Unicode")
        return str(value)

    def _bounded(self, text: str) -> str:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_CONSTRAINT_BYTES:
            raise self._bad(f"has {size:,} bytes; at most {MAX_CONSTRAINT_BYTES:,} are taken")
        return text

    def _bad(self, what: str) -> RequestError:
        return RequestError(f"{self.param} {what}", param=self.param)


def _shown(name: object) -> str:
    return repr(name[:64]) if isinstance(name, str) else "a field whose name is not text"


def _depth(value: object) -> int:
    """Levels of objects and lists inside each other; counting ends soon after the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_NESTING:
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        depth += any(isinstance(item, Mapping | list | tuple) for item in level)
        level = inner
    return depth
