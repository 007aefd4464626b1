"""The embedded model bound to choices, regexes and schemas, through OpenAI's client and offline."""

from __future__ import annotations

import json
import re

import openai
import pytest

from leadframe import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Bob is 33 and has a cat. Describe him in JSON."}]


def _check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "pets"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert set(value["pets"]) <= {"cat", "dog"}
    assert len(value["pets"]) <= 2


@pytest.fixture(scope="module")
def server(serve):
    with serve("--device", "cpu", "--max-num-seqs", "8") as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


@pytest.mark.slow
def test_a_schema_through_response_format(client, server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    for temperature in (0.0, 1.0):
        done = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=ASK,
            response_format=form,
            temperature=temperature,
            seed=1,
            max_tokens=120,
        )
        assert done.choices[0].finish_reason == "stop"
        _check(done.choices[0].message.content)


@pytest.mark.slow
def test_any_object_streams(client) -> None:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0.0,
        max_tokens=150,
        stream=True,
    )
    text, reason = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert reason == "length"


@pytest.mark.slow
def test_choice_and_regex_on_completions(client) -> None:
    model = client.models.list().data[0].id

    def complete(prompt, wanted, **fields):
        return client.completions.create(
            model=model, prompt=prompt, extra_body={"structured_outputs": wanted}, **fields
        ).choices

    choices = complete("Is water wet? Answer:", {"choice": [" yes", " no"]}, n=4, temperature=1.0)
    assert {choice.text for choice in choices} <= {" yes", " no"}
    assert [choice.finish_reason for choice in choices] == ["stop"] * 4
    number = complete("Call me: ", {"regex": r"\d{3}-\d{4}"}, temperature=1.0, max_tokens=20)
    assert re.fullmatch(r"\d{3}-\d{4}", number[0].text)


@pytest.mark.slow
def test_a_bad_schema_is_400_and_the_next_request_is_served(client, server) -> None:
    bad = {"prompt": "a", "structured_outputs": {"json": {"type": "nope"}}}
    assert server.http.post("/v1/completions", json=bad).status_code == 400
    good = {"prompt": "a", "structured_outputs": {"choice": ["b"]}}
    assert server.http.post("/v1/completions", json=good).json()["choices"][0]["text"] == "b"


@pytest.mark.slow
def test_offline_with_and_without_logprobs_and_neighbours() -> None:
    """Recorded decode steps, steps with log-probabilities and mixed batches agree."""
    with LLM(device="cpu", dtype="float32", kv_cache_memory_bytes=128 << 20) as llm:
        ids = llm.tokenizer.apply_chat_template(ASK)
        wanted = {"json": SCHEMA}
        plain = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=wanted)
        scored = SamplingParams(
            temperature=0.0, max_tokens=120, structured_outputs=wanted, logprobs=2
        )
        free = SamplingParams(temperature=0.0, max_tokens=20)
        alone = llm.generate([ids], plain)[0]
        _check(alone.text)
        mixed = llm.generate([ids, ids, "The sky is", ids], [plain, scored, free, plain])
        assert [mixed[i].text for i in (0, 1, 3)] == [alone.text] * 3
        assert len(mixed[1].logprobs) == len(mixed[1].token_ids)
