"""The scheduler benchmark: stable keys, and a cost that the waiting queue does not change."""

import json
from argparse import ArgumentParser

import pytest

from leadframe.bench import scheduler as bench

KEYS = {
    "running", "waiting", "us_per_step", "us_per_step_p99",
    "us_schedule", "us_build", "us_update", "steps",
}  # fmt: skip


def test_rows_and_keys():
    rows = bench.run_scheduler_bench((2, 8), (0, 5), steps=40, temperature=1.0)
    assert [(row["running"], row["waiting"]) for row in rows] == [(2, 0), (2, 5), (8, 0), (8, 5)]
    for row in rows:
        assert set(row) == KEYS
        assert row["steps"] == 40
        assert 0 < row["us_schedule"] < row["us_per_step"]
        assert row["us_per_step"] <= row["us_per_step_p99"]
        assert row["us_build"] > 0
        assert row["us_update"] > 0


@pytest.mark.parametrize("as_json", [True, False])
def test_command(capsys, as_json):
    parser = ArgumentParser()
    parser.add_argument("--json", action="store_true")
    bench.add_arguments(parser)
    argv = ["--running", "3", "--waiting", "4", "--steps", "5"] + ["--json"] * as_json
    assert bench.run(parser.parse_args(argv)) == 0
    out = capsys.readouterr().out
    if as_json:
        (row,) = json.loads(out)
        assert (row["running"], row["waiting"]) == (3, 4)
    else:
        header, line = out.splitlines()
        assert header.split()[:5] == ["running", "waiting", "schedule", "+", "build"]
        assert len(header) == len(line)
        assert line.split()[:2] == ["3", "4"]


def test_requests_that_wait_cost_nothing():
    """A step must not look at the whole queue: 3,000 waiting requests, the same step."""
    alone, crowded = bench.run_scheduler_bench((8,), (0, 3000), steps=100)
    assert crowded["us_schedule"] < 3 * alone["us_schedule"]
