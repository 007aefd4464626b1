"""What can be said of a constraint without a tokenizer."""

import json

import pytest

from leadframe import SamplingParams, StructuredOutputs
from leadframe.errors import RequestError
from leadframe.structured_outputs import MAX_CONSTRAINT_BYTES


def nested(levels):
    schema = {"type": "null"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "no constraint"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": ""}, "not JSON text"),
        ({"json": "[" * 100_000}, "bytes"),
        ({"json": "[" * 50_000}, "not JSON text"),
        ({"json": "[]"}, "an object"),
        ({"json": True}, "an object"),
        ({"json": nested(65)}, "64 levels"),
        ({"json": {"enum": [[[{}]] * 3] * 3, "items": nested(64)}}, "64 levels"),
        ({"json": json.dumps(nested(66))}, "64 levels"),
        ({"json": {"const": float("nan")}}, "not JSON"),
        ({"json": {"const": {1, 2}}}, "not JSON"),
        ({"json": {"const": "x" * MAX_CONSTRAINT_BYTES}}, "bytes"),
        ({"json_object": False}, "json_object"),
        ({"json_object": 1}, "json_object"),
        ({"regex": ""}, "non-empty"),
        ({"regex": 5}, "non-empty"),
        ({"regex": "\ud800"}, "valid Unicode"),
        ({"regex": "é" * (MAX_CONSTRAINT_BYTES // 2 + 1)}, "bytes"),
        ({"grammar": ""}, "non-empty"),
        ({"choice": []}, "1 to 1024"),
        ({"choice": "ab"}, "1 to 1024"),
        ({"choice": ["a"] * 1025}, "1 to 1024"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": ["a", 1]}, "non-empty"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({7: "a"}, "not text"),
    ],
)
def test_a_malformed_constraint_is_refused(fields, word):
    with pytest.raises(RequestError, match=word) as caught:
        SamplingParams(structured_outputs=fields)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"type": "object", "a": 1}}, "json", '{"type":"object","a":1}'),
        ({"json": ' {"b": 1, "a": 2}'}, "json", '{"b":1,"a":2}'),
        ({"json": nested(64)}, "json", json.dumps(nested(64), separators=(",", ":"))),
        ({"json_object": True}, "json", '{"type":"object"}'),
        ({"regex": "a+", "json": None}, "regex", "a+"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_a_constraint_has_one_text(fields, kind, text):
    wanted = SamplingParams(structured_outputs=fields).wanted
    assert (wanted.kind, wanted.text) == (kind, text)
    assert SamplingParams(structured_outputs=StructuredOutputs(**fields)).wanted == wanted


def test_a_constraint_and_allowed_ids_exclude_each_other():
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs={"regex": "a"}, allowed_token_ids=[1])
    assert caught.value.param == "allowed_token_ids"
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs="a")
