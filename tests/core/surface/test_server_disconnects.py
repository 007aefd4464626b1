"""A client that goes away frees its blocks at once; prefixes that are full stay cached."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest

BODY = {"prompt": "12345678", "max_tokens": 10_000, "ignore_eos": True}


@pytest.fixture
def endless(start, scripted):
    return start(scripted.echoes, max_model_len=20_000, num_blocks=6000, step_seconds=0.005)


def open_request(world, path="/v1/completions", **body):
    """Sends a request over a socket of its own."""
    data = json.dumps(BODY | body).encode()
    sock = socket.create_connection(("127.0.0.1", world.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def drop(sock):
    """Closes with a reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()


def half_close(sock):
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [drop, socket.socket.close, half_close])
@pytest.mark.parametrize("body", [{"stream": True}, {}, {"n": 3, "stream": True}, {"n": 3}])
def test_a_client_that_leaves(endless, scripted, leave, body):
    world = endless
    num = body.get("n", 1)
    sock = open_request(world, **body)
    if "stream" in body:
        assert b" 200 OK" in sock.recv(4096)
    scripted.wait_for(lambda: world.engine.num_running == num)
    leave(sock)
    before = world.runner.num_steps
    scripted.wait_for(lambda: world.engine.num_running == 0)
    assert world.runner.num_steps - before < 60, "steps went on for a client that is gone"
    world.wait_idle()
    aborts = 'leadframe_request_success_total{finished_reason="abort",model_name="scripted"}'
    assert f"{aborts} {float(num)}" in world.engine.metrics.render().decode()
    sock.close()


def test_the_prefix_of_a_client_that_left_stays_cached(endless, scripted):
    with open_request(endless, stream=True) as sock:
        sock.recv(4096)
    endless.wait_idle()
    usage = endless.complete("12345678", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


def test_a_client_that_leaves_while_it_waits(start, scripted):
    world = start(scripted.echoes, max_num_seqs=1, step_seconds=0.01)
    first = open_request(world, stream=True, max_tokens=200)
    scripted.wait_for(lambda: world.engine.num_running == 1)
    second = open_request(world, max_tokens=200)
    scripted.wait_for(lambda: world.engine.num_waiting == 1)
    drop(second)
    scripted.wait_for(lambda: world.engine.num_waiting == 0)
    assert world.engine.num_running == 1
    drop(first)
    world.wait_idle()


def test_a_client_that_leaves_before_its_body_is_there(world):
    sock = socket.create_connection(("127.0.0.1", world.port), timeout=5)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    drop(sock)
    assert world.complete().status_code == 200


def test_a_reader_that_stands_still_is_bounded_and_then_dropped(start, scripted, monkeypatch):
    """What waits for it is merged; when it takes nothing for too long it is let go."""
    monkeypatch.setattr("leadframe.server.streaming._STALL_SECONDS", 0.5)
    world = start(scripted.echoes, max_model_len=100_000, num_blocks=26_000)
    with contextlib.closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", world.port))
        data = json.dumps(BODY | {"stream": True, "max_tokens": 90_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        scripted.wait_for(lambda: world.engine.num_running == 1)
        scripted.wait_for(lambda: world.engine.num_running == 0, 60)
        assert world.metric("generation_tokens_total") < 90_000
    world.wait_idle()


def test_many_random_aborts_leave_nothing(start, scripted):
    """Clients that leave at any moment, streaming or not: all blocks and gauges return to 0."""
    world = start(scripted.echoes, max_model_len=400, num_blocks=60, max_num_seqs=8)
    rng = random.Random(7)
    left = threading.Semaphore(24)
    stop_at = [rng.random() * 0.03 for _ in range(300)]

    def one(delay, body):
        with left:
            sock = open_request(world, prompt="ab" * 20, max_tokens=100, **body)
            time.sleep(delay)
            drop(sock)

    threads = [
        threading.Thread(target=one, args=(delay, {"stream": bool(i % 2), "n": 1 + i % 3}))
        for i, delay in enumerate(stop_at)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    world.wait_idle(20)
    text = world.engine.metrics.render().decode()
    ended = sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("leadframe_request_success_total")
    )
    assert ended == world.metric("e2e_request_latency_seconds_count") > 0
    assert world.metric("prompt_tokens_total") == world.metric("request_prompt_tokens_sum")
    assert world.metric("generation_tokens_total") == world.metric("request_generation_tokens_sum")
    assert world.metric("oldest_request_age_seconds") == 0
    assert world.complete("abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
