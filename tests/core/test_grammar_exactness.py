"""What llguidance would take and read as something else is refused, and nothing else is."""

import json
import re

import pytest

from leadframe.errors import RequestError
from leadframe.grammar import GrammarCompiler
from leadframe.structured_outputs import StructuredOutputs

BIG = 2**53


class Bytes:
    vocab_size = 258

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b"<|end|>"[: 258 - token_id]

    def is_special(self, token_id):
        return token_id >= 256


@pytest.fixture(scope="module")
def grammars():
    return GrammarCompiler(Bytes(), 258, {256}, rehearse=False)


def takes(grammars, text, **fields):
    """Whether a constraint takes a whole text."""
    constraint = grammars.compile(StructuredOutputs(**fields))
    for token in text.encode():
        if constraint.mask().view("uint32")[token // 32] >> (token % 32) & 1:
            return False
        constraint.advance([*constraint._output, token])
    return constraint.is_complete or not constraint.mask().view("uint32")[8] & 1


_NUMBERS = [
    *((key, {"type": "integer", key: n}) for key in ("minimum", "maximum") for n in (-1e19, 1e19)),
    ("exclusiveMinimum", {"properties": {"a": {"exclusiveMinimum": -BIG - 1}}}),
    ("exclusiveMaximum", {"items": {"type": "number", "exclusiveMaximum": BIG + 1}}),
    ("multipleOf", {"$defs": {"a": {"multipleOf": 2**60}}}),
    ("multipleOf", {"type": "integer", "multipleOf": 2**31}),
    ("multipleOf", {"type": "integer", "multipleOf": 2**30}),
    ("multipleOf", {"type": "integer", "multipleOf": 429496729}),
    ("multipleOf", {"type": "number", "multipleOf": 1e-10}),
    ("multipleOf", {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65536}]}),
    ("const", {"const": BIG + 1}),
    ("enum", {"enum": ["a", {"b": [-BIG - 1]}]}),
]


@pytest.mark.parametrize(("key", "schema"), _NUMBERS)
def test_numbers_that_would_be_rounded_are_refused_by_name(grammars, key, schema) -> None:
    text = json.dumps(schema)
    for fields in ({"json": schema}, {"grammar": f"start: x\nx: %json {text}\n"}):
        with pytest.raises(RequestError, match=rf"cannot be used: it has .*{key}") as caught:
            grammars.compile(StructuredOutputs(**fields, param="response_format"))
        assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "integer", "minimum": BIG - 1, "maximum": BIG}, BIG, BIG + 1),
        ({"type": "integer", "minimum": -BIG, "maximum": -BIG}, -BIG, -BIG - 1),
        ({"const": BIG}, BIG, BIG - 1),
        ({"type": "integer", "multipleOf": 4096}, 8192, 8193),
        ({"type": "number", "multipleOf": 0.01}, 1.25, 1.255),
        ({"properties": {"minimum": {"const": 1}}, "additionalProperties": False, "type": "object"},
         {"minimum": 1}, {"minimum": 2}),
    ],
)  # fmt: skip
def test_numbers_that_are_exact_are_taken(grammars, schema, yes, no) -> None:
    assert takes(grammars, json.dumps(yes), json=schema)
    assert not takes(grammars, json.dumps(no), json=schema)
    in_lark = f"start: %json {json.dumps(schema)}"
    assert takes(grammars, json.dumps(yes), grammar=in_lark)


def test_json_that_is_only_quoted_in_a_grammar_is_not_read(grammars) -> None:
    assert takes(grammars, "%json {", grammar='start: "%json {"')


@pytest.mark.parametrize("text", ["abc\\", "\\\\\\", "(?x)a #c\nb", "(?ix: a\nb)", "(?x)a\tb"])
def test_regexes_that_would_be_misread_are_refused(grammars, text) -> None:
    wanted = [
        {"regex": text},
        {"json": {"type": "string", "pattern": text}},
        {"json": {"type": "object", "patternProperties": {text: {}}}},
        {"grammar": f"start: %json {json.dumps({'type': 'string', 'pattern': text})}"},
    ]
    for fields in wanted:
        with pytest.raises(RequestError, match=r"single backslash|the flag x"):
            grammars.compile(StructuredOutputs(**fields))


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("abc\\\\", "abc\\", "abc"),
        ("(?x)a b", "ab", "a b"),
        ("a\nb", "a\nb", "ab"),
        ("\\(?x\n", "(x\n", "x"),
        ("a/b\\/", "a/b/", "a/b"),
        ("(?i)a\nx", "A\nX", "ax"),
    ],
)
def test_regexes_that_are_exact_are_taken(grammars, text, yes, no) -> None:
    assert takes(grammars, yes, regex=text)
    assert not takes(grammars, no, regex=text)


@pytest.mark.parametrize("name", ["<|foo|>", "<foo>"])
def test_a_special_token_that_the_model_lacks_is_named_plainly(grammars, name) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(StructuredOutputs(grammar=f"start: {name}"))
    assert re.search("special token", str(caught.value))
    for word in ("panic", "backtrace", "EOS", "removal index"):
        assert word not in str(caught.value)


def test_neither_does_a_model_without_any(grammars) -> None:
    class Plain(Bytes):
        def token_bytes(self, token_id):
            return super().token_bytes(token_id) if token_id < 256 else b""

    plain = GrammarCompiler(Plain(), 258, {256}, rehearse=False)
    with pytest.raises(RequestError, match="special tokens, <NAME>") as caught:
        plain.compile(StructuredOutputs(grammar="start: <|foo|>"))
    assert "panic" not in str(caught.value)
