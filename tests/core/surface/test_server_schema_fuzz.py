"""Random JSON: never a 500, a bounded reply, and the server serves the next request."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leadframe.server import schema
from leadframe.server.replies import describe, from_validation

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, "", "a", "user", "\u0000", "\U0001f600"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)
NAMES = sorted(
    {*schema.ChatBody.model_fields, *schema.CompletionBody.model_fields, *schema.NEUTRAL}
)
FIELDS = st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), JSON, max_size=6)
PLAUSIBLE = {
    "prompt": st.one_of(st.text(max_size=6), st.lists(st.integers(-1, 1001), max_size=4), JSON),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(["user", "system", "assistant"]), JSON)},
            optional={"content": st.one_of(st.text(max_size=6), JSON), "name": JSON},
        ),
        max_size=3,
    ),
}
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def fuzzed(scripted):
    with scripted.running(scripted.says("ok"), max_model_len=64) as world:
        yield world
        assert world.complete().json()["choices"][0]["text"] == "ok"
        world.wait_idle(20)


def check(world, path, body):
    response = world.http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404, 503), response.text
    if response.status_code != 200:
        assert len(response.content) < 4096
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif "text/event-stream" in response.headers["content-type"]:
        assert response.text.endswith("data: [DONE]\n\n")


@FUZZ
@given(FIELDS, PLAUSIBLE["prompt"], st.booleans())
def test_completions(fuzzed, fields, prompt, keep):
    check(fuzzed, "/v1/completions", {**fields, "prompt": prompt} if keep else fields)


@FUZZ
@given(FIELDS, PLAUSIBLE["messages"])
def test_chat(fuzzed, fields, messages):
    check(fuzzed, "/v1/chat/completions", {**fields, "messages": messages})


@FUZZ
@given(JSON, st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize"]))
def test_anything(fuzzed, body, path):
    check(fuzzed, path, body)


@FUZZ
@given(st.fixed_dictionaries({}, optional={
    "prompt": JSON, "messages": PLAUSIBLE["messages"], "tokens": JSON,
    "add_special_tokens": SCALARS, "return_token_strs": SCALARS, "model": SCALARS,
}))  # fmt: skip
def test_text_routes(fuzzed, body):
    check(fuzzed, "/tokenize", body)
    check(fuzzed, "/detokenize", body)


@FUZZ
@given(st.binary(max_size=40))
def test_raw_bytes(fuzzed, data):
    response = fuzzed.http.post("/v1/completions", content=data)
    assert response.status_code == 400
    assert len(response.content) < 4096


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([schema.CompletionBody, schema.ChatBody, schema.TokenizeBody]),
    FIELDS,
    PLAUSIBLE["messages"],
)
def test_every_refusal_is_short_and_names_something(model, fields, messages):
    try:
        model.model_validate_json(json.dumps({**fields, "messages": messages}))
    except ValidationError as error:
        status, body, _ = describe(from_validation(error))
        assert status == 400
        assert 0 < len(body["error"]["message"]) <= 1000
        assert len(json.dumps(body)) < 8192


def test_every_integer_is_bounded():
    """The schema that clients see has a lower and an upper bound for every integer."""
    unbounded = []

    def walk(node, path):
        if isinstance(node, dict):
            if node.get("type") == "integer" and not {"minimum", "maximum"} <= set(node):
                unbounded.append(path)
            for key, value in node.items():
                walk(value, f"{path}.{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                walk(value, f"{path}[{index}]")

    for model in (schema.CompletionBody, schema.ChatBody, schema.TokenizeBody,
                  schema.DetokenizeBody):  # fmt: skip
        for name, field in model.model_json_schema()["properties"].items():
            walk(field, name)
    assert unbounded == []
