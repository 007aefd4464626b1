"""The embedded model bound to choices, regexes and schemas, through OpenAI's client and offline."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import httpx
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


_ENDLESS = " & ".join(f"/(x{{{n}}})*y/" for n in (97, 101, 103, 107))


def _children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def test_hostile_grammars_neither_end_nor_hold_a_server(serve, tiny_model) -> None:
    """Others are served beside them, SIGTERM ends it in time, and no process is left."""
    settings = ("--device", "reference", "--kv-cache-memory-bytes", "1MB")
    with serve(str(tiny_model), "--shutdown-timeout", "0.5", *settings) as server:
        url, answers = server.url + "/v1/completions", []

        def ask(wanted):
            body = {"prompt": "a", "structured_outputs": wanted}
            answers.append(httpx.post(url, json=body, timeout=60))
            return answers[-1]

        assert ask({"choice": ["b"]}).json()["choices"][0]["text"] == "b"
        for number in ({"minimum": -1e19, "maximum": -1e19}, {"multipleOf": 2**31}):
            refused = ask({"json": {"type": "integer", **number}})
            assert refused.status_code == 400
            assert next(iter(number)) in refused.json()["error"]["message"]
        children = _children(server.process.pid)
        assert len(children) == 1
        asking = threading.Thread(target=ask, args=({"grammar": f"start: A\nA: {_ENDLESS}"},))
        asking.start()
        asking.join(0.2)
        assert ask({"choice": ["b"]}).json()["choices"][0]["text"] == "b"
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 8
        asking.join(10)
        assert answers[-1].status_code == 503, "".join(server.lines)
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_two_ranks_are_bound_like_one(tiny_model) -> None:
    """The mask travels to every rank with the batch."""
    settings = {
        "device": "cpu",
        "options": {"threads": "1"},
        "block_size": 16,
        "num_blocks_override": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    asks = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=60, structured_outputs={"json": SCHEMA}),
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs={"regex": "[a-c]{6}"}),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    ]
    said = []
    for count in (1, 2):
        with LLM(str(tiny_model), tensor_parallel_size=count, **settings) as llm:
            said.append([done.text for done in llm.generate([[1, 2, 3]] * 3, asks)])
    assert said[0] == said[1]
    assert re.fullmatch("[a-c]{6}", said[0][1])
    assert said[0][0].startswith("{")
