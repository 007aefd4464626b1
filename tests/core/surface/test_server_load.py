"""Large bodies and slow clients do not hold up the others."""

import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

WORDS = "seven words that stand for a text " * 30_000
"""About one megabyte."""
IDS = list(range(256)) * 1_000
BODIES = {
    "tokenize": ("/tokenize", {"prompt": WORDS}),
    "tokenize with strings": ("/tokenize", {"prompt": WORDS, "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"messages": [{"role": "user", "content": WORDS}]}),
    "detokenize": ("/detokenize", {"tokens": IDS}),
    "ids": ("/v1/completions", {"prompt": IDS, "max_tokens": 1 << 30}),
    "texts": ("/v1/completions", {"prompt": ["a text " * 50] * 1_000, "max_tokens": 1 << 30}),
    "lists of ids": ("/v1/completions", {"prompt": [IDS[:300]] * 1_000, "max_tokens": 1 << 30}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * 90}] * 4_000},
    ),
}


@pytest.fixture
def turns(monkeypatch):
    """Processor time of the event loop's thread in each of its turns: no other load counts."""
    spent = []
    turn = asyncio.base_events.BaseEventLoop._run_once

    def timed(self):
        start = time.thread_time()
        turn(self)
        spent.append(time.thread_time() - start)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "_run_once", timed)
    return spent


@pytest.mark.parametrize("kind", BODIES)
def test_large_bodies_take_little_of_the_event_loop(turns, start, scripted, kind):
    world = start(scripted.says("x"), max_model_len=3_000_000)
    path, body = BODIES[kind]
    content = json.dumps(body)
    statuses = []

    def send():
        statuses.append(world.http.post(path, content=content).status_code)

    gc.collect()
    gc.freeze()  # what earlier tests left is not this one's to walk through
    turns.clear()
    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.unfreeze()
    assert set(statuses) <= {200, 400}
    assert len(statuses) == 2
    assert max(turns) < 0.2


def test_a_text_beyond_the_context_is_not_tokenised(start, scripted, error_of):
    world = start(scripted.says("x"), max_model_len=1_000)
    error = error_of(world.http.post("/tokenize", json={"prompt": WORDS}), param="prompt")
    assert "more than 1000 tokens" in error["message"]
    longer = {"prompt": "a" * 1_500}
    assert world.http.post("/tokenize", json=longer).json()["count"] == 1_500


def test_long_lists_of_a_reply_are_whole(start, scripted):
    world = start(scripted.says("x"), max_model_len=30_000)
    reply = world.http.post("/tokenize", json={"prompt": "ab" * 21_000}).json()
    assert reply["tokens"] == scripted.ids_of("ab") * 21_000
    assert reply["count"] == 42_000


def test_refused_prompts_leave_no_garbage_to_collect(world):
    """Cycles of a thousand errors made the collector stop every thread for half a second."""
    body = {"prompt": [[999_999]] * 500}
    assert world.http.post("/v1/completions", json=body).status_code == 400
    gc.collect()
    gc.disable()
    try:
        assert world.http.post("/v1/completions", json=body).status_code == 400
        assert gc.collect() < 5_000
    finally:
        gc.enable()


def opened(port, count, first):
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in sockets:
        sock.sendall(first)
        sock.settimeout(10)
    return sockets


def answer(sock):
    """Reads one reply; every reply here ends with a brace."""
    data = b""
    while not data.endswith(b"}"):
        data += sock.recv(65536)
    return data


@pytest.mark.parametrize("first", [b"", b"G", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_a_client_that_never_ends_its_headers_is_dropped(world, monkeypatch, first):
    monkeypatch.setattr("leadframe.server.lifecycle._HEADER_SECONDS", 0.3)
    sockets = opened(world.port, 200, first)
    assert world.http.get("/health").status_code == 200
    assert [sock.recv(1) for sock in sockets] == [b""] * 200
    for sock in sockets:
        sock.close()


def test_a_header_is_no_newer_for_each_byte(world, monkeypatch):
    monkeypatch.setattr("leadframe.server.lifecycle._HEADER_SECONDS", 0.4)
    (sock,) = opened(world.port, 1, b"GET /health HTTP/1.1\r\nX-Slow: ")
    deadline = time.monotonic() + 5
    with pytest.raises(ConnectionError):
        dribble(sock, deadline)
    sock.close()


def dribble(sock, deadline):
    while time.monotonic() < deadline:
        sock.sendall(b"a")
        time.sleep(0.05)


def test_the_second_request_of_a_connection_may_be_no_slower(world, monkeypatch):
    """uvicorn stops its own timer at the first byte."""
    monkeypatch.setattr("leadframe.server.lifecycle._HEADER_SECONDS", 0.3)
    (sock,) = opened(world.port, 1, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer(sock).startswith(b"HTTP/1.1 200")
    time.sleep(0.6)  # between requests a connection may rest for longer
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer(sock).startswith(b"HTTP/1.1 200")
    sock.sendall(b"GET")
    assert sock.recv(65536) == b""
    sock.close()


def test_a_refused_body_may_not_go_on_for_ever(start, scripted, monkeypatch):
    monkeypatch.setattr("leadframe.server.lifecycle._DISCARD_SECONDS", 0.3)
    world = start(scripted.says("x"), server={"max_body_bytes": 1024})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
    (sock,) = opened(world.port, 1, head)
    assert answer(sock).startswith(b"HTTP/1.1 413")
    sock.sendall(b"a")
    assert sock.recv(65536) == b""
    sock.close()


def test_a_slow_answer_is_waited_for(start, scripted, monkeypatch):
    monkeypatch.setattr("leadframe.server.lifecycle._HEADER_SECONDS", 0.2)
    world = start(scripted.says("x"))
    world.runner.gate.clear()
    threading.Timer(0.8, world.runner.gate.set).start()
    assert world.complete().status_code == 200


def test_the_limit_of_open_files_is_raised():
    code = (
        "import resource\n"
        "from leadframe.server.lifecycle import _allow_connections\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))\n"
        "_allow_connections()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1024, 1024)"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
