"""`serve`, `generate` and `bench serve` over a scripted engine."""

import json
import logging
import shlex
import threading

import httpx
import pytest

from leadframe.cli.main import main
from leadframe.engine import AsyncEngine, Engine
from leadframe.server.lifecycle import Server


@pytest.fixture
def engines(monkeypatch, scripted):
    """Makes `from_config` return scripted engines; holds (config, engine) of each."""
    made = []

    def build(cls, config, *, progress=None, **_):
        if progress is not None:
            progress(1, 2)
        engine = scripted.make_engine(scripted.says("Hello, world!"))
        made.append((config, engine))
        return engine

    monkeypatch.setattr(Engine, "from_config", classmethod(build))
    return made


@pytest.fixture
def served(monkeypatch):
    """Replaces the server loop; holds what `serve` would have served."""
    calls = []

    def run(services, sock, on_started):
        calls.append((services, sock.dup()))
        on_started()
        services.prompts.close()
        return 0

    monkeypatch.setattr("leadframe.server.lifecycle.run", run)
    yield calls
    for services, sock in calls:
        services.engine._commands.put(None)
        sock.close()


def test_serve_prints_where_time_and_memory_went_and_a_curl_that_works(
    engines, served, capsys, caplog, tmp_path
):
    caplog.set_level(logging.INFO)
    ledger = tmp_path / "start.json"
    argv = ["serve", "--device", "reference", "--port", "0", "--startup-json", str(ledger)]
    assert main([*argv, "--max-num-seqs", "3"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "reference" in lines[0]
    for phase in ("import", "load", "profile", "compile", "capture", "kv", "total"):
        assert any(line.startswith(phase) for line in lines)
    assert "KV cache: a scripted one" in out
    (services, sock) = served[0]
    port = sock.getsockname()[1]
    assert f"serving scripted at http://127.0.0.1:{port}" in out
    assert engines[0][0].scheduler.max_num_seqs == 3
    report = json.loads(ledger.read_text())
    assert {"model", "device", "max_model_len", "capacity", "phases", "total_seconds"} == set(
        report
    )
    curl = next(line for line in lines if line.strip().startswith("curl"))
    assert "Hello, world!" in ask(services, sock, curl).text
    assert not any(
        record.levelname == "INFO" and "error" in record.name for record in caplog.records
    )


def ask(services, sock, curl):
    """Runs a printed curl line against the services, as curl would."""
    ready = threading.Event()
    fresh = type(services)(services.engine, services.config, services.chat_template)
    server = Server(fresh, ready.set)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    assert ready.wait(10)
    command, url, *options = shlex.split(curl)
    assert command == "curl"
    pairs = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ", 1) for flag, value in pairs if flag == "-H")
    (data,) = [value for flag, value in pairs if flag == "-d"]
    response = httpx.post(url, content=data, headers=headers, timeout=10)
    server.should_exit = True
    thread.join(10)
    assert response.status_code == 200
    return response


def test_serve_without_a_template_suggests_completions(
    engines, served, capsys, monkeypatch, scripted
):
    def build(cls, config, **_):
        return scripted.make_engine(scripted.says("x"), tokenizer=scripted.make_tokenizer(None))

    monkeypatch.setattr(Engine, "from_config", classmethod(build))
    assert main(["serve", "--device", "reference", "--port", "0"]) == 0
    assert "/v1/completions " in capsys.readouterr().out


def test_serve_never_prints_a_key(engines, served, capsys, monkeypatch):
    argv = ["serve", "--device", "reference", "--port", "0"]
    assert main([*argv, "--api-key", "sk-secret"]) == 0
    monkeypatch.setenv("LEADFRAME_API_KEY", "sk-hidden")
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "sk-" not in out
    assert '"Authorization: Bearer $LEADFRAME_API_KEY"' in out
    assert [s.config.api_keys for s, _ in served] == [("sk-secret",), ("sk-hidden",)]


def test_serve_settings_reach_the_server(engines, served, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    argv = [
        "serve", "--device", "reference", "--host", "127.0.0.1", "--port", "0",
        "--served-model-name", "a", "--served-model-name", "b", "--chat-template", str(template),
        "--shutdown-timeout", "3.5", "--generation-config", "model", "--max-body-bytes", "1MiB",
        "--scheduling-policy", "priority",
    ]  # fmt: skip
    assert main(argv) == 0
    services, _ = served[0]
    config = services.config
    assert services.model_names == ("a", "b")
    assert services.chat_template == "{{ messages[0].content }}"
    assert (config.shutdown_timeout, config.generation_config) == (3.5, "model")
    assert (config.max_body_bytes, config.accept_priority) == (1 << 20, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"fine\n\xff", "not UTF-8 text: line 2 has the byte 0xff"),
        (b"fine\n{% for m in %}", "not valid: line 2: "),
        (b"fine\n\n{{ x | nosuch }}", "line 3: No filter named 'nosuch'"),
        (b"{% for m in x %}" * 30 + b"{% endfor %}" * 30, "nested blocks"),
        (b"x" * (2 << 20), "larger than"),
    ],
)
def test_a_bad_template_stops_the_start_before_anything_loads(
    engines, tmp_path, capsys, content, words
):
    template = tmp_path / "t.jinja"
    if content is not None:
        template.write_bytes(content)
    argv = ["serve", "--device", "reference", "--port", "0", "--chat-template", str(template)]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert f"--chat-template {template}" in err
    assert words in err
    assert engines == []


def test_a_ledger_that_cannot_be_written_stops_the_start(engines, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "no-folder" / "start.json"):
        argv = ["serve", "--device", "reference", "--port", "0", "--startup-json", str(path)]
        assert main(argv) == 2
        assert f"--startup-json {path} cannot be written" in capsys.readouterr().err
    assert engines == []


def test_a_start_that_fails_leaves_no_empty_ledger(engines, world, tmp_path):
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        argv = ["serve", "--device", "reference", "--startup-json", str(tmp_path / name)]
        assert main([*argv, "--port", str(world.port)]) == 2
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old.json", "{}")]


def test_serve_finds_a_busy_port_before_it_loads(engines, world, capsys):
    assert main(["serve", "--device", "reference", "--port", str(world.port)]) == 2
    assert f"127.0.0.1:{world.port} is in use" in capsys.readouterr().err
    assert engines == []


def test_an_absent_device_builds_no_engine(engines, capsys):
    assert main(["serve", "--device", "nosuch", "--port", "0"]) >= 10
    assert engines == []


def test_generate_streams_one_prompt(engines, capsys):
    assert main(["generate", "--device", "reference", "-p", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, world!\n"
    assert "reference" in captured.err


def test_generate_sampling_flags(engines, capsys):
    argv = ["generate", "--device", "reference", "-p", "hi", "--max-tokens", "3", "--temperature"]
    assert main([*argv, "0"]) == 0
    assert main([*argv, "0", "--max-tokens", "64", "--stop", ", w"]) == 0
    assert capsys.readouterr().out == "Hel\nHello\n"


def test_generate_runs_a_file_as_a_batch(engines, capsys, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text('plain text\n"a JSON\\nstring"\n\n{"prompt": "an object"}\n{"other": 1}\n')
    argv = ["generate", "--device", "reference", "--prompts-file", str(file)]
    assert main([*argv, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["prompt"] for r in rows] == [
        "plain text",
        "a JSON\nstring",
        "an object",
        '{"other": 1}',
    ]
    assert all(row["text"] == "Hello, world!" for row in rows)
    assert set(rows[0]) == {
        "prompt", "text", "finish_reason", "prompt_tokens", "output_tokens", "error",
    }  # fmt: skip
    assert main(argv) == 0
    assert capsys.readouterr().out.count("Hello, world!") == 4


def test_generate_chat_uses_the_template(engines, capsys):
    seen = []
    argv = ["generate", "--device", "reference", "-p", "hi", "--json", "--chat"]
    assert main(argv) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["prompt_tokens"] == len("[user]hi[assistant]") + 1


def test_generate_refuses_what_does_not_fit(engines, capsys):
    assert main(["generate", "--device", "reference", "-p", "x" * 300]) == 1
    assert "300 tokens" in capsys.readouterr().err
    assert main(["generate", "--device", "reference", "--prompts-file", "/nope"]) == 2


def test_generate_reports_a_failure(monkeypatch, scripted, capsys):
    def build(cls, config, **_):
        return scripted.make_engine(lambda request, position: None)

    monkeypatch.setattr(Engine, "from_config", classmethod(build))
    assert main(["generate", "--device", "reference", "-p", "hi"]) == 1
    assert "not finite" in capsys.readouterr().err
    assert main(["generate", "--device", "reference", "-p", "hi", "-p", "ho"]) == 1


def test_bench_serve_measures_a_server(start, scripted, capsys):
    world = start(scripted.echoes, step_seconds=0.005, max_model_len=2000, num_blocks=2000)
    argv = [
        "bench", "serve", "--base-url", f"http://127.0.0.1:{world.port}", "--num-requests", "6",
        "--concurrency", "3", "--prompt-words", "4", "--max-tokens", "8",
    ]  # fmt: skip
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["failed"], report["output_tokens"]) == (6, 0, 48)
    assert report["model"] == "scripted"
    assert report["output_tokens_per_second"] == pytest.approx(48 / report["seconds"])
    for name in ("ttft", "itl", "tpot", "e2e"):
        values = report[f"{name}_seconds"]
        assert set(values) == {"mean", "p50", "p90", "p99"}
        assert 0.002 < values["mean"] < 2
    assert main([*argv, "--request-rate", "100"]) == 0
    assert "output tok/s" in capsys.readouterr().out


def test_bench_serve_reports_failures(start, scripted, capsys):
    world = start(scripted.echoes)
    url = f"http://127.0.0.1:{world.port}/v1"
    argv = ["bench", "serve", "--base-url", url, "--num-requests", "2", "--json"]
    assert main([*argv, "--max-tokens", "999"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 2
    assert "max_tokens" in report["errors"][0] or "prompt" in report["errors"][0]
    assert report["ttft_seconds"]["mean"] is None


def test_bench_serve_needs_a_server(capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert main(["bench", "serve", "--base-url", "ftp://x"]) == 2
    assert main(["bench", "serve", "--concurrency", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_engine_flags_of_a_benchmark_reach_the_engine(engines, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        "leadframe.bench.latency.run", lambda args, llm: seen.append((args, llm)) or 0
    )
    argv = ["bench", "latency", "--device", "reference", "--max-num-seqs", "5", "--json"]
    assert main(argv) == 0
    (args, llm) = seen[0]
    assert args.json is True
    assert llm.engine is engines[0][1]
    assert engines[0][0].scheduler.max_num_seqs == 5


def test_async_engine_is_what_serve_builds(engines, served):
    assert main(["serve", "--device", "reference", "--port", "0"]) == 0
    assert isinstance(served[0][0].engine, AsyncEngine)
