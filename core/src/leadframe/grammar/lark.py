"""A constraint → a Lark grammar of llguidance's dialect, which means the same."""

from __future__ import annotations

import json
from typing import Final

from leadframe.errors import RequestError
from leadframe.grammar.exactness import misread_grammar, misread_regex, misread_schema
from leadframe.grammar.vocabulary import library
from leadframe.structured_outputs import StructuredOutputs

_WHITESPACE: Final = r" |\n[ \t]{0,20}"
"""Between JSON's tokens: a space, or a new line and its indentation. Without a bound, a model that
cannot decide writes blanks for ever."""
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
"""Any spelling of a text is allowed, not only the one that the tokenizer would choose."""


def lark_of(wanted: StructuredOutputs) -> str:
    """Writes a constraint as a Lark grammar.

    Raises:
      RequestError: the library is not installed, or would read something else in it.
    """
    if wanted.kind == "grammar":  # the options come last, so that lines keep their numbers
        _refuse(wanted, misread_grammar(wanted.text))
        return f"{wanted.text}\n{_OPTIONS}\n"
    if wanted.kind == "choice":
        start = " | ".join(json.dumps(choice) for choice in json.loads(wanted.text))
    elif wanted.kind == "regex":
        _refuse(wanted, misread_regex(wanted.text))
        start = f"/{library().regex_to_lark(wanted.text, 'd')}/"
    else:
        schema = json.loads(wanted.text)
        _refuse(wanted, misread_schema(schema))
        schema["x-guidance"] = {"whitespace_pattern": _WHITESPACE}
        start = f"%json {json.dumps(schema)}"
    return f"start: {start}\n{_OPTIONS}\n"


def cannot_use(wanted: StructuredOutputs, problem: str) -> RequestError:
    """Returns the error for a constraint that is no good."""
    return RequestError(
        f"{wanted.param} has a {wanted.kind} that cannot be used: {_shortened(problem)}",
        param=wanted.param,
    )


def _refuse(wanted: StructuredOutputs, problem: str | None) -> None:
    if problem is not None:
        raise cannot_use(wanted, problem)


def _shortened(text: str) -> str:
    """The first lines of the library's message, without the grammar that it quotes."""
    if text.startswith("panic"):  # what the library says of itself then helps nobody
        return (
            "the grammar library failed on it; check that the special tokens, <NAME>, that it "
            "names are the model's"
        )
    text = text.replace("; following special tokens are available: ⟦≺EOS≻⟧", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not (line[0].isdigit() and " | " in line) and line != "^"]
    return "; ".join(kept)[:300]
