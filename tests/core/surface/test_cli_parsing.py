"""The command line before an engine exists: help, mistakes, configuration, speed."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time

import pytest

from leadframe.cli import bench, compile_check
from leadframe.cli.engine_args import add_engine_arguments, engine_config, parse_with_config_file
from leadframe.cli.main import COMMANDS, main
from leadframe.cli.parser import Parser, byte_size, field_help, key_value, op_names, token_count
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import ConfigError, DeviceLost
from leadframe.platform.discovery import EntryPoint
from leadframe.server.settings import ServerConfig


def parse(*argv):
    parser = Parser(prog="leadframe test")
    parser.add_argument("model", nargs="?")
    add_engine_arguments(parser)
    return engine_config(parse_with_config_file(parser, argv))


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("conformance", "new-backend")])
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"leadframe {name}" in capsys.readouterr().out


def test_help_and_mistakes_import_no_engine():
    """What a person gets wrong is answered before anything heavy is imported."""
    code = (
        "import sys\nfrom leadframe.cli.main import main\n"
        "for argv in (['version'], ['serve', '--devise', 'x'], ['serve', '--device', 'nosuch'],"
        " ['generate'], ['serve', '--max-num-seqs', '0'], ['devices', '--jsn']):\n"
        "    main(argv)\n"
        "heavy = {'fastapi', 'uvicorn', 'leadframe.engine', 'transformers', 'torch', 'jax'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_absent_device_fails_at_once_on_one_screen():
    argv = [
        sys.executable,
        "-m",
        "leadframe.cli.main",
        "serve",
        "--device",
        "nosuch",
        "--port",
        "0",
    ]
    best = float("inf")
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        best = min(best, time.monotonic() - start)
    assert done.returncode not in (0, 1)
    assert done.stdout == ""
    assert "nosuch" in done.stderr
    assert len(done.stderr.splitlines()) <= 24
    assert "Traceback" not in done.stderr
    assert best < 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srve"], ["'srve'", "did you mean 'serve'"]),
        (["serve", "--devise", "cpu"], ["'--devise'", "did you mean '--device'", "--help"]),
        (["serve", "--max-model"], ["'--max-model'", "did you mean '--max-model-len'"]),
        (["serve", "a", "b"], ["argument 'b'"]),
        (["serve", "--max-model-len", "4x"], ["--max-model-len", "'4x'", "4k or 4K"]),
        (["serve", "--kv-cache-memory-bytes", "2XB"], ["'2XB'", "2GiB"]),
        (["serve", "--gpu-memory-utilization", "1.5"], ["1.5", "(0, 1]"]),
        (["serve", "--max-num-seqs", "0"], ["--max-num-seqs", "at least 1"]),
        (["serve", "-o", "x"], ["'x' is not KEY=VALUE"]),
        (["serve", "--port", "70000"], ["70000"]),
        (["serve", "--model-impl", "magic"], ["magic", "transformers"]),
        (["serve", "--chat-template", "/nope.jinja"], ["--chat-template", "/nope.jinja"]),
        (["serve", "--config", "/nope.toml"], ["--config", "/nope.toml"]),
        (["generate"], ["--prompt", "--prompts-file"]),
        (["generate", "-p", "x", "--temperature", "9"], ["temperature", "[0, 2]"]),
        (["bench", "thruput"], ["'thruput'", "did you mean 'throughput'"]),
        (["compile-check", "nosuch"], ["'nosuch'"]),
        (["version", "--loud"], ["'--loud'"]),
        (["serve", "--trust-remote-code"], ["'--trust-remote-code'", "never run"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_to_do(argv, words, capsys):
    assert main(argv) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("leadframe: ")
    assert all(word in err for word in words), err
    assert len(err.splitlines()) <= 3


def test_errors_end_with_their_own_status(monkeypatch, capsys):
    def lost(argv):
        raise DeviceLost("gone")

    monkeypatch.setattr("leadframe.cli.version.run", lost)
    assert main(["version"]) == DeviceLost.exit_code
    assert capsys.readouterr().err == "leadframe: gone\n"


def test_ctrl_c_is_130(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("leadframe.cli.version.run", interrupted)
    assert main(["version"]) == 130


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m leadframe.cli.main serve --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "usage" in done.stdout
    assert "Traceback" not in done.stderr


def test_flags_reach_the_configuration():
    config = parse(
        "m", "--dtype", "bfloat16", "--max-model-len", "4K", "--model-impl", "transformers",
        "--seed", "3", "--device", "cpu:0", "-o", "a=1", "-o", "b=x=y", "--op",
        "attention=triton,reference", "--op-fallback", "host", "--tensor-parallel-size", "2",
        "--enforce-eager", "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "2GiB",
        "--block-size", "32", "--kv-cache-dtype", "float16", "--no-enable-prefix-caching",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "1k", "--no-enable-chunked-prefill",
        "--long-prefill-token-threshold", "64", "--scheduling-policy", "priority",
        "--max-num-queued-reqs", "9",
    )  # fmt: skip
    assert config == EngineConfig(
        model="m", dtype="bfloat16", max_model_len=4096, model_impl="transformers", seed=3,
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1000, enable_chunked_prefill=False,
            long_prefill_token_threshold=64, policy="priority", max_num_queued_reqs=9),
        cache=CacheConfig(
            block_size=32, gpu_memory_utilization=0.5, kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=False, kv_cache_dtype="float16"),
        device=DeviceConfig(
            device="cpu:0", options={"a": "1", "b": "x=y"},
            op_order={"attention": ("triton", "reference")}, op_fallback="host",
            tensor_parallel_size=2, enforce_eager=True),
    )  # fmt: skip


def test_no_flags_give_the_defaults():
    assert parse() == EngineConfig()


def test_tensor_parallel_has_a_short_flag():
    assert parse("-tp", "2").device.tensor_parallel_size == 2


def test_flags_are_not_abbreviated():
    with pytest.raises(ConfigError, match="--enforce"):
        parse("--enforce")


@pytest.mark.parametrize(
    "config", [EngineConfig, SchedulerConfig, CacheConfig, DeviceConfig, ServerConfig]
)
def test_every_field_is_documented(config):
    helps = field_help(config)
    assert {f.name for f in dataclasses.fields(config)} == set(helps)
    assert all(len(text) > 8 for text in helps.values())


@pytest.mark.parametrize(
    "command", ["serve", "generate", "devices", *(f"bench {name}" for name in bench.BENCHMARKS)]
)
def test_help_speaks_to_people_who_know_no_python(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\b(None|True|False|Ttft|itl|tpot)\b", out)


def test_help_shows_docstrings_and_defaults(capsys):
    assert main(["serve", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Token budget of a step. (default: 2048)" in out
    assert "Address to bind" in out
    assert "(default: 127.0.0.1)" in out


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("1M", 1 << 20)]
)
def test_token_counts(text, value):
    assert token_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5gb", 1_500_000_000),
     ("3 KiB", 3072), ("7b", 7)],
)  # fmt: skip
def test_byte_sizes(text, value):
    assert byte_size(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [(token_count, "-1"), (token_count, "4kb"), (token_count, ""), (byte_size, "GiB"),
     (byte_size, "1e9"), (byte_size, "9" * 400), (token_count, "9" * 20), (key_value, "=x"),
     (op_names, "attention")],
)  # fmt: skip
def test_bad_values(read, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        read(text)


def test_the_command_line_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.delenv("LEADFRAME_DEVICE", raising=False)
    file = tmp_path / "c.toml"
    file.write_text(
        "max-num-seqs = 4\nmax_num_batched_tokens = 64\nenable-prefix-caching = false\n"
        'device = "file"\no = ["a=1", "b=2"]\nenforce-eager = true\n'
    )
    config = parse("--config", str(file), "--max-num-seqs", "7")
    assert config.scheduler.max_num_seqs == 7
    assert config.scheduler.max_num_batched_tokens == 64
    assert config.cache.enable_prefix_caching is False
    assert config.device.device == "file"
    assert config.device.options == {"a": "1", "b": "2"}
    assert config.device.enforce_eager is True
    monkeypatch.setenv("LEADFRAME_DEVICE", "env")
    assert parse("--config", str(file)).device.device is None
    assert parse("--config", str(file), "--device", "cli").device.device == "cli"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-sequences = 4", "max-num-sequences = 4: .* did you mean '--max-num-seqs'"),
        ("= 1", "is not TOML: .*line 1"),
        ("a = '\xff'", "is not TOML"),
        ("[device]\nname = 'x'", r"device = \{'name': 'x'\}: it must be a string"),
        ("block-size = true", "block-size = true: it must be an integer"),
        ("block-size = '16'", "block-size = '16': it must be an integer"),
        ("block-size = [16, 32]", r"block-size = \[16, 32\]: it must be an integer"),
        (
            "max-num-seqs = 4.5",
            "max-num-seqs = 4.5: it must be an integer, or a string with a unit",
        ),
        ("max-num-seqs = '4x'", "max-num-seqs = '4x': .* '4x' is not a number such as"),
        ("gpu-memory-utilization = 'half'", "= 'half': it must be a number"),
        ("enforce-eager = 'yes'", "enforce-eager = 'yes': it must be true or false"),
        ("enable-prefix-caching = 1", "= 1: it must be true or false"),
        ("dtype = 16", "dtype = 16: it must be a string"),
        ("device = 1979-05-27", "device = .*: it must be a string"),
        ("o = ['a=1', 2]", "it must be a string, or a list of them"),
        ("o = ['nothing']", "'nothing' is not KEY=VALUE"),
        ("scheduling-policy = 'best'", "scheduling-policy = 'best': .*invalid choice"),
        ("help = true", "help = true: --help cannot stand in a file"),
        ("config = 'x'", "--config cannot stand in a file"),
        ("'' = 1", "unknown option"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, words):
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"--config {file}.*{words}"):
        parse("--config", str(file))


def test_a_flag_that_is_off_in_the_file_is_off(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("enforce-eager = false\ngpu-memory-utilization = 1\nmax-num-seqs = '1k'")
    config = parse("--config", str(file), "--max-num-batched-tokens", "1k")
    assert config.device.enforce_eager is False
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.scheduler.max_num_seqs == 1000


def test_a_wrong_port_in_the_file_is_named(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text("port = true")
    assert main(["serve", "--config", str(file)]) == 2
    assert f"--config {file}: port = true: it must be an integer" in capsys.readouterr().err


def test_devices_as_json_has_stable_keys(capsys):
    assert main(["devices", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (reference,) = [row for row in rows if row["name"] == "reference"]
    keys = {"name", "distribution", "version", "contract", "kind", "state", "reason", "devices"}
    assert set(reference) == keys
    assert reference["state"] == "ready"


def test_devices_for_people(capsys):
    assert main(["devices", "-v"]) == 0
    out = capsys.readouterr().out
    assert "NAME" in out.splitlines()[0]
    assert "reference: " in out


@pytest.mark.parametrize(
    "command",
    [
        "throughput --rounds 0", "throughput --num-requests -3", "latency --max-tokens 0",
        "host --steps 0", "host --running 0", "serve --concurrency x", "startup --rounds 0",
        "scheduler --steps 0",
    ],
)  # fmt: skip
def test_a_benchmark_of_nothing_is_refused(capsys, command):
    assert main(["bench", *command.split()]) == 2
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_every_benchmark_follows_the_convention():
    import importlib

    for name in bench.BENCHMARKS:
        module = importlib.import_module(f"leadframe.bench.{name}")
        parser = Parser(prog="x")
        module.add_arguments(parser)
        assert callable(module.run)
        assert parser.parse([]) is not None


def test_compile_check_goes_to_the_platforms_distribution(monkeypatch, capsys):
    seen = []

    def load():
        return lambda argv: seen.append(argv) or 7

    points = [EntryPoint("mine", "leadframe-mine", "1", load)]
    monkeypatch.setattr(compile_check, "installed_entry_points", lambda *_: points)
    assert main(["compile-check", "mine", "--target", "x"]) == 7
    assert seen == [["--target", "x"]]
    assert main(["compile-check", "mien"]) == 2
    assert "did you mean 'mine'" in capsys.readouterr().err
    assert main(["compile-check", "cuda"]) == 2
    hint = "pip install ./backends/torch ./backends/triton ./backends/cuda"
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_compile_check_makes_no_wild_guess(name, capsys):
    assert main(["compile-check", name]) == 2
    err = capsys.readouterr().err
    assert "did you mean" not in err
    assert ("cpu is installed and compiles nothing ahead" in err) == (name == "cpu")


@pytest.mark.parametrize("flag", ["--tokenizer", "--enable-lora", "--quantization", "--dtpe"])
def test_a_wild_guess_at_an_option_is_not_made(flag, capsys):
    assert main(["serve", flag, "x"]) == 2
    err = capsys.readouterr().err
    assert f"unknown option {flag!r}" in err
    assert ("did you mean" in err) == (flag == "--dtpe")
