"""The host benchmark: a whole engine over a device that computes nothing."""

import json
from argparse import ArgumentParser

import pytest

from leadframe.bench import host as bench
from leadframe.errors import ConfigError


@pytest.mark.parametrize("as_json", [True, False])
def test_command(capsys, tiny_model, monkeypatch, as_json):
    monkeypatch.setattr("leadframe.bench.idle_backend.FIRST_TOKEN", 10)  # a small vocabulary
    parser = ArgumentParser()
    parser.add_argument("--json", action="store_true")
    bench.add_arguments(parser)
    argv = ["--model", str(tiny_model), "--running", "3", "--steps", "30", "--step-ms", "0.1"]
    argv += ["--ways", *bench.WAYS] + ["--json"] * as_json
    assert bench.run(parser.parse_args(argv)) == 0
    out = capsys.readouterr().out
    if as_json:
        rows = json.loads(out)
        assert [row["way"] for row in rows] == list(bench.WAYS)
        for row in rows:
            assert set(row) == {"running", "way", "us_gap", "us_gap_p99", "steps"}
            assert 0 < row["us_gap"] <= row["us_gap_p99"]
            assert 20 <= row["steps"] <= 30
    else:
        header, *lines = out.splitlines()
        assert len(lines) == len(bench.WAYS)
        assert all(len(line) == len(header) for line in lines)


def test_a_vocabulary_that_is_too_small_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="has 320 tokens; tokens from 1000 on are drawn"):
        bench.run_host_bench([1], ["greedy"], model=str(tiny_model))
