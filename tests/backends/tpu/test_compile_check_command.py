"""The command `leadframe compile-check tpu` where libtpu is not installed."""

import json

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
