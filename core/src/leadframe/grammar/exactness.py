"""What llguidance takes and then reads as something else. It is refused instead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES: Final = ("const", "enum")
_MAX_NUMBER: Final = 2**53
"""Numbers of a schema go through doubles, which hold every integer up to here."""
_MAX_REMAINDER: Final = 2**32
"""Remainders are computed in 32 bits, without a check."""


def misread_schema(schema: object) -> str | None:
    """Says what in a JSON schema would be read as something else; None where all is exact."""
    multiples: list[Fraction] = []
    for key, value in _items(schema):
        problem = None
        if key in _BOUNDS and _is_number(value):
            problem = _misread_number(key, value)
            if key == "multipleOf" and problem is None:
                multiples.append(Fraction(repr(value)))
        elif key in _VALUES:
            numbers = (item for item in _leaves(value) if _is_number(item))
            problem = next(filter(None, (_misread_number(key, item) for item in numbers)), None)
        elif key == "pattern" and isinstance(value, str):
            problem = _within(key, misread_regex(value))
        elif key == "patternProperties" and isinstance(value, Mapping):
            found = (misread_regex(pattern) for pattern in value)
            problem = _within(key, next(filter(None, found), None))
        if problem is not None:
            return problem
    return _misread_multiples(multiples)


def misread_grammar(text: str) -> str | None:
    """Says what in the JSON schemas of a Lark grammar would be read as something else."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*(?=\{)", text):
        try:
            schema, _ = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):  # no schema, or one that does not compile either
            continue
        problem = misread_schema(schema)
        if problem is not None:
            return problem
    return None


def misread_regex(text: str) -> str | None:
    """Says what in a regex would be read as something else."""
    slashes = len(text) - len(text.rstrip("\\"))
    if slashes % 2:
        return "it ends in a single backslash, which escapes nothing"
    bare = re.sub(r"\\.", "", text, flags=re.DOTALL)
    if re.search(r"[\n\r\t]", text) and re.search(r"\(\?[a-wyzA-Z]*x", bare):
        # They are passed on as escapes, which this flag does not ignore.
        return "it has the flag x and line breaks or tabs; leave one of the two out"
    return None


def _misread_number(key: str, value: float) -> str | None:
    if abs(value) > _MAX_NUMBER:
        return f"it has {key} {value!r:.40}; numbers up to 2^53 = {_MAX_NUMBER} are exact"
    return None


def _misread_multiples(multiples: list[Fraction]) -> str | None:
    """Remainders, and least common multiples where schemas meet, must fit their 32 bits."""
    scale = 1
    while any((scale * value).denominator > 1 for value in multiples) and scale < _MAX_REMAINDER:
        scale *= 10
    sizes = sorted(abs(int(value * scale)) for value in multiples)
    worst = 10 * max(sizes, default=0) + 9 * scale
    if worst >= _MAX_REMAINDER:
        return f"it has multipleOf {float(max(multiples))!r}, with more digits than are exact"
    if len(sizes) > 1 and sizes[-1] * sizes[-2] >= _MAX_REMAINDER:
        return "it has several multipleOf whose common multiples have more digits than are exact"
    return None


def _items(schema: object) -> Iterator[tuple[str, Any]]:
    """Every key and value of every object in a schema."""
    for item in _nodes(schema):
        if isinstance(item, Mapping):
            yield from item.items()


def _leaves(value: object) -> Iterator[Any]:
    return (item for item in _nodes(value) if not isinstance(item, Mapping | list | tuple))


def _nodes(value: object) -> Iterator[object]:
    open_nodes = [value]
    while open_nodes:
        item = open_nodes.pop()
        yield item
        if isinstance(item, Mapping):
            open_nodes += item.values()
        elif isinstance(item, list | tuple):
            open_nodes += item


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(key: str, problem: str | None) -> str | None:
    return None if problem is None else f"of its {key}, {problem}"
