"""Health, draining, a dead engine, the port."""

import logging
import signal
import socket
import threading
import time

import pytest

from leadframe.errors import ConfigError, DeviceLost
from leadframe.server.lifecycle import bind
from leadframe.server.schema import CompletionBody
from leadframe.server.settings import ServerConfig


def test_health_and_readiness(world):
    assert world.http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert world.http.get("/health/ready").json() == {"status": "ready"}


def test_small_routes(world):
    import leadframe

    assert world.http.get("/version").json() == {"version": leadframe.__version__}
    models = world.http.get("/v1/models").json()
    (model,) = models["data"]
    assert models["object"] == "list"
    assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 256)
    assert world.http.get("/v1/models/scripted").json() == model


def test_names_that_are_given_replace_the_models(start, scripted):
    world = start(scripted.says("x"), server={"served_model_names": ("a/b", "c")})
    assert [m["id"] for m in world.http.get("/v1/models").json()["data"]] == ["a/b", "c"]
    assert world.http.get("/v1/models/a/b").json()["root"] == "scripted"
    assert world.complete(model="c").json()["model"] == "c"
    assert world.complete().json()["model"] == "a/b"
    assert world.complete(model="scripted").status_code == 404
    assert 'leadframe_num_requests_running{model_name="a/b"}' in world.http.get("/metrics").text


def test_metrics_are_exposed(world):
    world.complete()
    response = world.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "leadframe_request_success_total{" in response.text
    assert world.metric("event_loop_lag_seconds") >= 0


def test_a_failing_metric_fails_no_request(start, scripted, monkeypatch):
    world = start(scripted.says("x"))
    monkeypatch.setattr(world.engine.metrics, "ttft", None)
    monkeypatch.setattr(world.engine.metrics, "e2e", None)
    assert world.complete().json()["choices"][0]["text"] == "x"
    assert world.metric("metrics_errors_total") > 0


def test_the_api_is_documented(world):
    paths = world.http.get("/openapi.json").json()["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["required"] == ["prompt"]
    assert "/v1/chat/completions" in paths


def test_liveness_follows_progress(start, scripted, monkeypatch, error_of):
    """A step that never ends is not alive; waiting for work is."""
    monkeypatch.setattr("leadframe.engine.async_engine._STALL_SECONDS", 0.3)
    world = start(scripted.says("x"))
    time.sleep(0.5)
    assert world.http.get("/health").status_code == 200
    world.runner.gate.clear()
    thread = threading.Thread(target=world.complete)
    thread.start()
    scripted.wait_for(lambda: world.http.get("/health").status_code == 503)
    error = error_of(world.http.get("/health"), 503)
    assert "no step has ended" in error["message"]
    error_of(world.http.get("/health/ready"), 503)
    world.runner.gate.set()
    thread.join(10)
    assert world.http.get("/health").status_code == 200


def test_a_dead_engine_ends_the_process(start, scripted, error_of, caplog):
    world = start(scripted.echoes, step_seconds=0.01)
    body = {"prompt": "abc", "stream": True, "max_tokens": 250}
    with caplog.at_level(logging.CRITICAL):
        with world.http.stream("POST", "/v1/completions", json=body) as response:
            scripted.wait_for(lambda: world.engine.num_running == 1)
            world.runner.error = DeviceLost("the device at /dev/x fell off")
            text = response.read().decode()
        assert '"type":"service_unavailable"' in text
        assert "/dev/x" not in text
        assert text.endswith("data: [DONE]\n\n")
        scripted.wait_for(lambda: not world._thread.is_alive(), 10)
    assert world.server.exit_code == 4
    assert "fell off" in caplog.text


def test_sigterm_lets_running_requests_finish(start, scripted, error_of):
    world = start(scripted.echoes, step_seconds=0.01, server={"shutdown_timeout": 20})
    body = {"prompt": "abc", "stream": True, "max_tokens": 60}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        scripted.wait_for(lambda: world.engine.num_running == 1)
        world.server.handle_exit(signal.SIGTERM, None)
        reply = world.complete()
        error_of(reply, 503)
        assert reply.headers["retry-after"] == "5"
        assert world.http.get("/health").status_code == 200
        error_of(world.http.get("/health/ready"), 503)
        text = response.read().decode()
    assert '"finish_reason":"length"' in text
    scripted.wait_for(lambda: not world._thread.is_alive(), 10)
    assert world.server.exit_code == 0


def test_sigterm_aborts_what_takes_too_long(start, scripted):
    world = start(
        scripted.echoes, max_model_len=9000, num_blocks=2500, step_seconds=0.01,
        server={"shutdown_timeout": 0.3},
    )  # fmt: skip
    body = {"prompt": "abc", "stream": True, "max_tokens": 8000}
    started = time.monotonic()
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        scripted.wait_for(lambda: world.engine.num_running == 1)
        world.server.handle_exit(signal.SIGTERM, None)
        text = response.read().decode()
    assert "going down" in text
    assert text.endswith("data: [DONE]\n\n")
    scripted.wait_for(lambda: not world._thread.is_alive(), 10)
    assert time.monotonic() - started < 10
    assert world.server.exit_code == 0


def test_the_second_signal_leaves_at_once(start, scripted):
    world = start(scripted.echoes, step_seconds=0.01, server={"shutdown_timeout": 60})
    body = {"prompt": "abc", "stream": True, "max_tokens": 250}
    with world.http.stream("POST", "/v1/completions", json=body):
        scripted.wait_for(lambda: world.engine.num_running == 1)
        world.server.handle_exit(signal.SIGINT, None)
        world.server.handle_exit(signal.SIGINT, None)
        scripted.wait_for(lambda: not world._thread.is_alive(), 10)
    assert world.server.exit_code == 130


def test_a_port_in_use_is_a_clear_error(world):
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{world.port} is in use .*--port"):
        bind(ServerConfig(port=world.port))


def test_an_address_that_is_not_ours_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"cannot bind 192\.0\.2\.1"):
        bind(ServerConfig(host="192.0.2.1", port=0))


def test_small_writes_are_not_held_back(world):
    """With Nagle's algorithm on, every second write of a reply waits 40 ms."""
    world.http.get("/health")
    for connection in list(world.server.server_state.connections):
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_it_binds_to_this_machine_only_unless_told(world):
    assert ServerConfig().host == "127.0.0.1"
    with bind(ServerConfig(port=0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with bind(ServerConfig(host="::1", port=0)) as sock:
        assert sock.family == socket.AF_INET6


@pytest.mark.parametrize(
    "settings",
    [
        {"host": ""}, {"port": 65536}, {"shutdown_timeout": -1}, {"max_body_bytes": 1},
        {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("é",)},
        {"served_model_names": ("",)}, {"served_model_names": ("a\n",)},
    ],
)  # fmt: skip
def test_settings_are_checked(settings):
    with pytest.raises(ConfigError, match=next(iter(settings)).rstrip("s").replace("_", "-")):
        ServerConfig(**settings)


def test_long_bodies_are_parsed_beside_the_event_loop(world, monkeypatch):
    threads = []
    parse = CompletionBody.model_validate_json

    def spy(data):
        threads.append(threading.current_thread().name.split("_")[0])
        return parse(data)

    monkeypatch.setattr(CompletionBody, "model_validate_json", spy)
    world.complete("short")
    world.complete([1] * 100_000)
    assert threads[0] != "leadframe-json"
    assert threads[1] == "leadframe-json"


@pytest.mark.parametrize("kind", ["too large", "long text", "long chat", "many ids"])
def test_large_bodies_do_not_stop_the_event_loop(start, scripted, kind):
    """Parsing and tokenising run beside the loop; one of three tries must be undisturbed."""
    world = start(scripted.says("x"), max_model_len=10_000_000)
    content = {
        "too large": b'{"prompt": "' + b"x" * 20_000_000 + b'"}',
        "long text": b'{"prompt": "' + b"word " * 200_000 + b'"}',
        "long chat": b'{"messages": [{"role": "user", "content": "' + b"word " * 200_000 + b'"}]}',
        "many ids": b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
    }[kind]
    status = 413 if kind == "too large" else 400
    path = "/v1/chat/completions" if kind == "long chat" else "/v1/completions"
    worst = min(_worst_health(world, path, content, status) for _ in range(3))
    assert worst < 0.5, f"/health took {worst:.3f} s"


def _worst_health(world, path, content, status):
    statuses, times = [], []

    def send():
        statuses.append(world.http.post(path, content=content).status_code)

    thread = threading.Thread(target=send)
    thread.start()
    while thread.is_alive():
        start = time.monotonic()
        assert world.http.get("/health").status_code == 200
        times.append(time.monotonic() - start)
        time.sleep(0.02)
    assert statuses == [status]
    return max(times)
