"""Streams: the order of events, the same text as without a stream, errors in the middle."""

import asyncio
import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadframe.engine import RequestOutput
from leadframe.request import FinishReason
from leadframe.sampling_params import SamplingParams
from leadframe.server.generation import Batch, Job
from leadframe.server.prompts import ReadPrompt
from leadframe.server.replies import HttpError


def test_a_completion_stream_in_full(world, scripted):
    response = world.complete(stream=True, max_tokens=3, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = scripted.events_of(response)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hel"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(c["usage"] is None for c in chunks)
    assert len({c["id"] for c in chunks}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


def test_no_usage_unless_asked_for(world, scripted):
    events = scripted.events_of(world.complete(stream=True))
    assert all("usage" not in event for event in events[:-1])


def test_the_first_chat_chunk_has_the_role_and_only_it(world, scripted):
    *chunks, done = scripted.events_of(world.chat(stream=True, n=2))
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [c["finish_reason"] for c in mine].count("stop") == 1
        assert mine[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello, world!"
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


def test_chat_stream_with_usage_and_logprobs(world, scripted):
    body = {"logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = scripted.events_of(world.chat(stream=True, return_token_ids=True, **body))
    assert usage["usage"]["completion_tokens"] == 14
    assert "prompt_token_ids" in chunks[0]
    choices = [c["choices"][0] for c in chunks[1:]]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    whole = world.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert entries == whole
    tokens = [t for c in choices for t in c["token_ids"]]
    assert tokens == [*scripted.ids_of("Hello, world!"), scripted.EOS]


def test_echoed_stream_with_logprobs_equals_the_whole(world, scripted):
    body = {"echo": True, "logprobs": 2, "max_tokens": 4}
    chunks = scripted.events_of(world.complete("abc", stream=True, **body))[:-1]
    whole = world.complete("abc", **body).json()["choices"][0]
    joined = {key: [] for key in whole["logprobs"]}
    for chunk in chunks:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"] == "abcHell"
    assert joined == whole["logprobs"]


def streamed(scripted, response):
    """Joins a completion stream into (text, finish_reason, stop_reason) a choice."""
    texts, ends = {}, {}
    *chunks, done = scripted.events_of(response)
    assert done == "[DONE]"
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            assert index not in ends, "two finish reasons"
            ends[index] = (choice["finish_reason"], choice["stop_reason"])
    return {i: (texts[i], *ends[i]) for i in texts}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text(alphabet="abcé€😀\n", max_size=12),
    stop=st.lists(st.text(alphabet="abcé€", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    echo=st.booleans(),
    max_tokens=st.integers(1, 20),
    n=st.integers(1, 3),
)
def test_stream_equals_non_stream(scripted, echo_world, text, stop, include, echo, max_tokens, n):
    body = {
        "stop": stop, "include_stop_str_in_output": include, "echo": echo,
        "max_tokens": max_tokens, "n": n,
    }  # fmt: skip
    prompt = text or "x"
    whole = echo_world.complete(prompt, **body).json()
    expected = {
        c["index"]: (c["text"], c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
    }
    assert streamed(scripted, echo_world.complete(prompt, stream=True, **body)) == expected


@pytest.fixture(scope="module")
def echo_world(scripted):
    """Each request repeats its own prompt for ever, through every kind of character."""
    with scripted.running(scripted.echoes) as world:
        yield world


def test_a_stop_string_that_spans_tokens_never_leaks(start, scripted):
    world = start(scripted.says("ABCDEF"))
    chunks = scripted.events_of(world.complete(stream=True, stop=["CDEF"]))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "AB"
    assert chunks[-1]["choices"][0]["stop_reason"] == "CDEF"
    other = start(scripted.says("ABCDX"))
    chunks = scripted.events_of(other.complete(stream=True, stop=["CDEF"]))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "ABCDX"


def test_a_refusal_comes_before_the_stream(world, error_of):
    error_of(world.complete([999], stream=True, max_tokens=10**6), 400, "max_tokens")
    error_of(world.complete([1000], stream=True), 400, "prompt")


def test_an_error_in_the_middle_is_an_event(start, scripted):
    def script(request, position):
        return scripted.ids_of("a")[0] if position < 2 else None

    world = start(script)
    *chunks, error, done = scripted.events_of(world.complete(stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "aa"
    assert error["error"]["code"] == "generation_failed"
    assert "not finite" in error["error"]["message"]
    assert done == "[DONE]"
    world.wait_idle()


def test_text_that_waits_with_an_error_is_sent_before_it():
    """The engine merges what a slow reader misses: text and failure may come as one output."""

    async def stream():
        yield RequestOutput("r", (1, 2), "ab", finish_reason=FinishReason.ERROR, error="broke")

    async def read():
        job = Job("r", ReadPrompt([1]), SamplingParams())
        async for _, output in Batch([job], [stream()], lambda batch: None).outputs():
            seen.append((output.text, output.finish_reason))

    seen = []
    with pytest.raises(HttpError, match="broke"):
        asyncio.run(read())
    assert seen == [("ab", None)]


def test_one_failing_choice_ends_its_siblings(start, scripted, error_of):
    def script(request, position):
        return None if request.request_id.endswith("-1") else scripted.ids_of("a")[0]

    world = start(script, max_model_len=256)
    error_of(world.complete(n=3, max_tokens=200), 500)
    world.wait_idle()
    *_, error, done = scripted.events_of(world.complete(n=3, max_tokens=200, stream=True))
    assert "error" in error
    assert done == "[DONE]"
    world.wait_idle()


def test_tokens_come_as_they_are_made(start, scripted):
    """The first event arrives while the model is held before the second token."""
    held = threading.Event()

    def script(request, position):
        assert position == 0 or held.wait(10)
        return scripted.says("Hello")(request, position)

    world = start(script)
    body = {"prompt": "x", "stream": True}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["text"] == "H"
        held.set()
        assert "data: [DONE]" in list(lines)


def test_headers_come_once_the_request_is_queued(start, scripted):
    """A client learns that it was accepted before the first token."""
    world = start(scripted.says("x"))
    world.runner.gate.clear()
    body = {"prompt": "x", "stream": True}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        world.runner.gate.set()
        assert "data: [DONE]" in list(response.iter_lines())


def test_a_silent_stream_is_kept_alive(start, scripted, monkeypatch):
    """While a request waits, comments tell proxies that the connection is in use."""
    monkeypatch.setattr("leadframe.server.streaming._KEEP_ALIVE_SECONDS", 0.05)
    world = start(scripted.says("x"))
    world.runner.gate.clear()
    body = {"prompt": "x", "stream": True}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(3)] == [": still here", "", ": still here"]
        world.runner.gate.set()
        assert "data: [DONE]" in list(lines)


def test_what_a_slow_reader_misses_is_merged(start, scripted):
    """However late it reads, at most one output waits, and nothing is lost or repeated."""
    world = start(scripted.echoes, max_model_len=8000, num_blocks=2100)
    body = {"prompt": "0123456789", "stream": True, "max_tokens": 4000}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        scripted.wait_for(lambda: not world.engine.has_work, 60)
        text = response.read().decode()
    chunks = [json.loads(x[6:]) for x in text.split("\n\n")[:-2]]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "0123456789" * 400
    assert len(chunks) < 4000
