"""`response_format` and `structured_outputs` over HTTP: forms, refusals, ends, isolation."""

import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def json_world(scripted):
    """A server whose model says one JSON object, then more than any grammar allows."""
    with scripted.running(scripted.says('{"a": 12}', end=65)) as world:
        yield world
        world.wait_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"response_format": {**FORMAT, "json_schema": {
            "name": "t", "schema": SCHEMA, "strict": None, "description": "words"}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"structured_outputs": {"regex": r'\{"a": \d\d\}'}},
        {"structured_outputs": {"choice": ["no", '{"a": 12}']}},
        {"structured_outputs": {"grammar": 'start: "{" /[^}]+/ "}"'}},
        {"structured_outputs": {"choice": ['{"a": 12}']}, "response_format": {"type": "text"}},
    ],
)  # fmt: skip
def test_both_routes_end_with_the_constraint(json_world, fields):
    num_tokens = len('{"a": 12}')
    chat = json_world.chat(**fields, logprobs=True).json()
    choice = chat["choices"][0]
    assert choice["message"]["content"] == '{"a": 12}'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert len(choice["logprobs"]["content"]) == num_tokens
    assert chat["usage"]["completion_tokens"] == num_tokens
    done = json_world.complete(max_tokens=30, n=2, **fields).json()
    assert [c["text"] for c in done["choices"]] == ['{"a": 12}'] * 2
    assert done["usage"]["completion_tokens"] == 2 * num_tokens


def test_a_constraint_that_max_tokens_cuts_ends_with_length(json_world):
    done = json_world.complete(max_tokens=4, structured_outputs={"json": SCHEMA}).json()
    assert done["choices"][0]["text"] == '{"a"'
    assert done["choices"][0]["finish_reason"] == "length"


def test_a_stream_carries_the_same_text_and_ends_alike(json_world, scripted):
    events = scripted.events_of(json_world.chat(response_format=FORMAT, stream=True))
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(c["delta"].get("content", "") for c in choices) == '{"a": 12}'
    assert choices[-1]["finish_reason"] == "stop"


DEEP = '{"items":' * 2000 + "{}" + "}" * 2000
NESTED = '{"items":' * 70 + "{}" + "}" * 70


@pytest.mark.parametrize(
    "value",
    [
        {"regex": "["},
        {"regex": "(((("},
        {"json": {"type": "nope"}},
        {"json": {"$ref": "#"}},
        {"json": ""},
        {"json": True},
        {"json": DEEP},
        {"json": json.loads(NESTED)},
        {"json": {"const": "x" * 70_000}},
        {"json_object": False},
        {"choice": []},
        {"choice": ["a"], "regex": "a"},
        {"grammar": "start: nowhere"},
        {"structural_tag": "{}"},
        {},
        "json",
        [],
    ],
)
def test_a_bad_constraint_is_refused_and_the_next_is_served(json_world, error_of, value):
    for stream in (False, True):
        body = {"structured_outputs": value, "max_tokens": 20, "stream": stream}
        error = error_of(json_world.complete(**body), 400)
        assert error["param"] == "structured_outputs"
        good = json_world.complete(structured_outputs={"json": SCHEMA})
        assert good.json()["choices"][0]["text"] == '{"a": 12}'
    json_world.wait_idle()


def test_a_body_that_is_nested_too_deep_to_read(json_world, error_of):
    body = '{"prompt": "a", "structured_outputs": {"json": ' + DEEP + "}}"
    error_of(json_world.http.post("/v1/completions", content=body), 400)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"type": "json"}, "json_schema"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "without schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "without name"),
        ({"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "k": 1}}, "'k'"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}, "no"),
        ({"type": "json_object", "extra": 1}, "json_object"),
        ("json_object", "json_object"),
        ({}, "json_object"),
    ],
)
def test_a_bad_response_format(json_world, error_of, value, word):
    error = error_of(json_world.chat(response_format=value), 400, "response_format")
    assert word in error["message"]


def test_one_constraint_only(json_world, error_of):
    both = {"response_format": FORMAT, "structured_outputs": {"json": SCHEMA}}
    error_of(json_world.chat(**both), 400, "structured_outputs")
    ids = {"response_format": FORMAT, "allowed_token_ids": [5]}
    error = error_of(json_world.chat(**ids), 400, "allowed_token_ids")
    assert "response_format" in error["message"]


def test_what_breaks_on_the_way_ends_one_request(start, scripted, error_of):
    """This model obeys no mask; the grammar notices, and the others go on."""
    world = start(scripted.says("nonsense"))
    error = error_of(world.complete(structured_outputs={"choice": ["yes"]}, max_tokens=5), 500)
    assert "grammar" in error["message"]
    assert world.complete().json()["choices"][0]["text"] == "nonsense"
    world.wait_idle()


def test_requests_with_constraints_are_counted_by_kind(start, scripted):
    world = start(scripted.says("yes", end=65))
    for value in ({"choice": ["yes"]}, {"regex": "yes"}, {"regex": "y.s"}, {"regex": "["}):
        world.complete(structured_outputs=value)
    world.complete()
    text = world.engine.metrics.render().decode()
    counts = {
        line.split('constraint="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("leadframe_structured_requests_total{")
    }
    assert counts == {"json": 0, "regex": 2, "choice": 1, "grammar": 0}
