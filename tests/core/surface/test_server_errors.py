"""Bad requests: each is refused by name, in a few hundred bytes, and the next one is served."""

import http.client
import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from leadframe.server import schema


@pytest.fixture(autouse=True)
def _still_serves(world):
    """After every test the server serves, with all blocks free."""
    yield
    assert world.complete().json()["choices"][0]["text"] == "Hello, world!"
    world.wait_idle()


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [[1], []], ["a", ""]])
def test_an_empty_prompt(world, error_of, prompt):
    error_of(world.complete(prompt), 400, "prompt")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"logit_bias": {"1000": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
    ],
)
def test_ids_outside_the_vocabulary(world, error_of, body, param):
    error_of(world.complete(**body), 400, param)


def test_ids_that_only_the_logits_have_are_served(world):
    """The bound is the width of the logits, not the size of the tokenizer."""
    assert world.complete([999], stop_token_ids=[999], logit_bias={"999": 1}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", 1e300), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**31), ("top_k", 1.5),
        ("min_p", -1), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("seed", 2**63), ("seed", True), ("n", 0), ("n", 129),
        ("n", 10**30), ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 2**31),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", 21), ("logprobs", True),
        ("prompt_logprobs", -1), ("stop", [""]), ("stop", ["x"] * 17), ("stop", 5),
        ("priority", 1), ("cache_salt", ""), ("cache_salt", "x" * 129), ("stream", "yes"),
        ("echo", 1), ("suffix", "x"), ("best_of", 2), ("temprature", 1), ("use_beam_search", True),
        ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_absurd_values(world, error_of, field, value):
    error = error_of(world.complete(**{field: value}), 400)
    assert field in error["message"]
    assert error["param"].split(".")[0] == field


def test_a_misspelt_field_gets_the_right_name(world, error_of):
    assert "did you mean 'temperature'" in error_of(world.complete(temprature=1))["message"]


def test_non_finite_numbers(world, error_of):
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = '{"prompt": "a", "temperature": ' + text + "}"
        error_of(world.http.post("/v1/completions", content=body), 400)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(16, 1, "prompt"), (10, 10, "max_tokens"), (17, None, "prompt"), (17, 1, "prompt")],
)
def test_more_than_the_context(start, scripted, error_of, num_prompt, max_tokens, param):
    world = start(scripted.echoes, max_model_len=16)
    body = {} if max_tokens is None else {"max_tokens": max_tokens}
    error = error_of(world.complete([1] * num_prompt, **body), 400, param)
    assert error["code"] == "context_length_exceeded"
    assert "16" in error["message"]
    assert str(num_prompt) in error["message"]
    if param == "max_tokens":
        assert str(max_tokens) in error["message"].replace("max_tokens is ", "")
    assert world.complete([1] * 10, max_tokens=6).json()["usage"]["completion_tokens"] == 6


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(world, error_of, monkeypatch):
    monkeypatch.setattr(world.engine.tokenizer, "encode", None)
    for text in ("x" * 100_000, " " * 1_000_000):
        for reply in (world.complete(text), world.chat(text)):
            error = error_of(reply, 400)
            assert error["code"] == "context_length_exceeded"
    monkeypatch.undo()


def test_a_prompt_that_the_pool_can_never_hold(start, scripted, error_of):
    world = start(scripted.says("x"), max_model_len=64, num_blocks=8)
    error_of(world.complete([1] * 40), 400)
    assert world.complete([1] * 4).status_code == 200


def test_an_overlong_prompt_among_others_refuses_all_of_them(world, error_of):
    error_of(world.complete([[1], [2] * 300, [3]]), 400, "prompt")


def test_too_many_choices(world, error_of):
    error_of(world.complete([[1]] * 9, n=128), 400)
    error_of(world.complete([[1]] * 1025), 400, "prompt")


def test_a_full_queue_answers_503(start, scripted, error_of):
    world = start(scripted.echoes, max_num_seqs=1, max_num_queued_reqs=1, step_seconds=0.02)
    body = {"prompt": "a", "stream": True, "max_tokens": 250}
    with world.http.stream("POST", "/v1/completions", json=body):
        scripted.wait_for(lambda: world.engine.num_running == 1)
        waiting = threading.Thread(target=world.complete, kwargs={"max_tokens": 1})
        waiting.start()
        scripted.wait_for(lambda: world.engine.num_waiting == 1)
        for stream in (False, True):
            reply = world.complete(stream=stream)
            error_of(reply, 503)
            assert reply.headers["retry-after"] == "1"
    waiting.join(10)
    assert world.metric("admission_rejections_total") == 2
    world.wait_idle()


def test_another_models_name(world, error_of):
    error = error_of(world.complete(model="gpt-4"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "scripted" in error["message"]
    error_of(world.http.get("/v1/models/nope"), 404, "model")


def test_unknown_routes_and_methods(world, error_of):
    error_of(world.http.get("/v2/models"), 404)
    error_of(world.http.get("/v1/completions"), 405)
    error_of(world.http.put("/v1/models"), 405)
    error_of(world.http.request("OPTIONS", "/v1/chat/completions"), 405)
    error_of(world.http.get("/v1/models/"), 404)
    error_of(world.http.get("/" + "x" * 5000), 404)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 10_000],
)
def test_bodies_that_are_not_an_object(world, error_of, content):
    error_of(world.http.post("/v1/completions", content=content), 400)


SHARED_FIELDS = sorted(schema.CompletionBody.model_fields)


def test_many_errors_are_summed_up(world, error_of):
    error = error_of(world.post("/v1/completions", {name: [[]] for name in SHARED_FIELDS}))
    assert error["message"].count(";") == 5
    assert "more errors" in error["message"]


def test_errors_do_not_amplify(world, error_of, caplog):
    bodies = [
        {"prompt": [["a"] * 1000]},
        {"prompt": [[["a"]]] * 1000},
        {"prompt": "a", "stop_token_ids": ["x"] * 100},
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(1000)}},
        {"prompt": "a", **{f"field{i}" * 20: {"deep": [1] * 50} for i in range(200)}},
        {"prompt": "a", "temperature": "secret-text" * 2000},
        {"prompt": "a", "model": "m" * 100_000},
        {name: ["secret-text"] for name in SHARED_FIELDS},
    ]
    with caplog.at_level(logging.DEBUG):
        for body in bodies:
            error = error_of(world.post("/v1/completions", body))
            assert "secret-text" not in json.dumps(error)
        messages = [{"role": 1, "content": {"a": [i]}} for i in range(1000)]
        error_of(world.post("/v1/chat/completions", {"messages": messages}), 400)
    assert "secret-text" not in caplog.text


def test_a_body_over_the_cap(start, scripted, error_of):
    world = start(scripted.says("x"), server={"max_body_bytes": 4096})
    error = error_of(world.complete("a" * 5000), 413)
    assert "4,096" in error["message"]

    def chunks():
        for _ in range(50):
            yield b"x" * 1000

    error_of(world.http.post("/v1/completions", content=chunks()), 413)
    assert world.complete("a" * 200, max_tokens=1).status_code == 200


def test_a_lying_content_length(world):
    with socket.create_connection(("127.0.0.1", world.port), timeout=5) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999\r\n\r\n"
        )
        assert b" 413 " in sock.recv(4096)


def test_headers_over_the_cap(world):
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=5)
    connection.request("GET", "/health", headers={"X-Long": "x" * 200_000})
    response = connection.getresponse()
    body = json.loads(response.read())
    assert response.status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    connection.close()


def test_what_is_not_http(world):
    with socket.create_connection(("127.0.0.1", world.port), timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        reply = sock.recv(4096)
    assert b" 400 " in reply
    assert b'{"error":' in reply


def test_every_reply_has_an_id(world):
    sent = {"X-Request-Id": "my-id_1.2"}
    assert world.http.get("/health", headers=sent).headers["x-request-id"] == "my-id_1.2"
    for bad in ("a b", "x" * 200, "a\tb", "{}"):
        got = world.http.get("/v1/models", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert got != bad
        assert len(got) == 32
    first, second = (world.complete(max_tokens=1).json()["id"] for _ in range(2))
    assert first != second


def test_two_requests_may_send_the_same_id(world):
    headers = {"X-Request-Id": "same"}
    bodies = [{"prompt": "a", "n": 2}] * 2
    with ThreadPoolExecutor(2) as pool:
        replies = pool.map(lambda b: world.post("/v1/completions", b, headers=headers), bodies)
    assert [reply.status_code for reply in replies] == [200, 200]


def test_prompts_are_not_logged(world, caplog):
    with caplog.at_level(logging.DEBUG):
        world.complete("top secret prompt")
        world.post("/v1/completions?token=secret", {"prompt": "top secret prompt", "n": "x"})
    clients = ("httpx", "httpcore")
    lines = [r.getMessage() for r in caplog.records if r.name.split(".")[0] not in clients]
    assert any("POST /v1/completions 200" in line for line in lines)
    assert not any("secret" in line for line in lines)


def test_an_internal_error_says_nothing_of_itself(start, scripted, error_of, monkeypatch):
    world = start(scripted.says("x"))

    def broken(body):
        raise KeyError("/home/me/private 0xdeadbeef")

    monkeypatch.setattr(world.services.params, "for_completion", broken)
    error = error_of(world.complete(), 500)
    assert "private" not in error["message"]
    assert "deadbeef" not in error["message"]
    assert world.chat().status_code == 200


def test_a_failure_in_the_engine_is_scrubbed(start, scripted, error_of):
    world = start(scripted.says("x"))

    def script(request, position):
        return None

    world.runner.script = script
    error = error_of(world.complete(), 500)
    assert error["code"] == "generation_failed"
    world.runner.script = scripted.says("x")
    assert world.complete().json()["choices"][0]["text"] == "x"


def test_messages_are_bounded_and_scrubbed():
    from leadframe.server.replies import bounded, scrubbed

    assert len(bounded("x" * 5000)) == 1000
    assert bounded("a\x1b[31m\r") == "a\\x1b[31m\\r"
    assert scrubbed("at /usr/lib/x.py: <obj at 0x7f00deadbeef>") == "at …: <obj at …>"
    assert scrubbed("10 / 2 and a/b") == "10 / 2 and a/b"
