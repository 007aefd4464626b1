"""Tensor parallelism over virtual devices of the host gives what one device gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("tp_probe.py")
REPLICATED = ("norm.weight", "layernorm.weight", "o_proj.bias")


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, str(PROBE)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=[2, 4])
def ranks(request):
    return request.param


def test_the_same_step_gives_the_same_tokens(report, ranks):
    errors = report[str(ranks)]["errors"]
    exact = ("tokens", "rank", "top_ids", "finite")
    assert {name for name in errors if name.startswith("decode.")}
    for name, error in errors.items():
        assert error <= (0 if name.split(".")[-1] in exact else 5e-6), name


def test_each_rank_reads_its_slices_only(report, ranks):
    shares = report[str(ranks)]["shares"]
    for name, share in shares.items():
        is_kv = ranks == 4 and ("k_proj" in name or "v_proj" in name)  # two heads, each held twice
        wanted = 1.0 if name.endswith(REPLICATED) else 1 / (2 if is_kv else ranks)
        assert share == wanted, name


def test_block_bytes_count_heads_that_are_stored_twice(report, ranks):
    assert report[str(ranks)]["block_bytes"] == (2.0 if ranks == 4 else 1.0)


def test_the_kit_proves_what_three_devices_exchange():
    script = "from leadframe.conformance import main; raise SystemExit(main())"
    cases = ("B.ranks", "D.ranks", "F.ranks", "I.ranks")
    command = [sys.executable, "-c", script, "tpu:interpreter"]
    command += [text for case in cases for text in ("--case", case)]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "3"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-500:]
    assert "7 passed, 1 skipped" in done.stdout, "weights of a process"
