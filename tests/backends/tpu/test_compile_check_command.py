"""The command `leadframe compile-check tpu` where libtpu is not installed."""

import json
import tomllib
from pathlib import Path

import pytest

from leadframe_tpu.compile_check import main as command

ARGV = ["--model", "kernels", "--step", "decode", "--tensor-parallel-size", "1", "--json"]


@pytest.fixture
def without_libtpu(monkeypatch):
    """Lowers one small step and compiles nothing."""
    from leadframe_tpu.compile_check import cases

    few = cases.cases
    monkeypatch.setattr(command, "has_compiler", lambda: False)
    monkeypatch.setattr(cases, "cases", lambda *args: list(few(*args))[:1])


def test_a_target_that_was_not_compiled_for_is_no_success(without_libtpu, capsys):
    assert command.main(["--target", "v5e:2x2", *ARGV]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["evidence"] == "lowered-only"
    assert {row["target"] for row in report["steps"]} == {"v5e:2x2 (lowered only)"}


def test_lowering_is_enough_where_no_target_was_named(without_libtpu, capsys):
    assert command.main(ARGV) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["target"] for row in report["steps"]} == {"any (lowered only)"}


def test_no_extra_pairs_libtpu_with_a_jax_that_it_cannot_serve():
    """libtpu 0.0.42 is JAX 0.10's; JAX 0.12 over it fails: "no such field: 'debug_locations'"."""
    path = Path(__file__).parents[3] / "backends/tpu/pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    for wanted in extras.values():
        assert any(each.startswith("jax") and each.endswith(",<0.11") for each in wanted)
