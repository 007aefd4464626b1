"""The benchmarks of an engine: keys, progress, and the mark of rounds that others disturbed."""

import json
import sys
from argparse import ArgumentParser

import pytest

from leadframe.bench import latency, throughput
from leadframe.bench.load_guard import LoadGuard, Sample, disturbance
from leadframe.errors import ConfigError


@pytest.fixture
def foreign(monkeypatch):
    """Sets the foreign load of every stretch, in turn."""

    def set_loads(*fractions):
        loads = iter(fractions * 50)
        monkeypatch.setattr(LoadGuard, "sample", lambda self: Sample(2.0, next(loads)))

    return set_loads


def run(benchmark, llm, *argv):
    parser = ArgumentParser()
    parser.add_argument("--json", action="store_true")
    benchmark.add_arguments(parser)
    return benchmark.run(parser.parse_args(argv), llm)


SMALL = ("--workload", "batch", "--compare", "none", "--num-requests", "1", "--max-tokens", "3")


def large(tiny_llm):
    return tiny_llm(num_blocks_override=300)


def test_throughput_shows_rounds_as_they_end(tiny_llm, foreign, capsys):
    foreign(0.0)
    assert run(throughput, large(tiny_llm), *SMALL, "--rounds", "2") == 0
    out, err = capsys.readouterr()
    assert "batch, round 1 of 2: leadframe, 2.0 s, 1.5 tok/s\nbatch, round 2 of 2" in err
    assert "round" not in out


PEER = """
import json, sys
print(json.dumps({"name": f"scripted, {sys.argv[2]} threads"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [[7] * asked["max_tokens"] for _ in asked["prompts"]]
    print(json.dumps({"seconds": 1.0, "token_ids": tokens}), flush=True)
"""


def test_any_program_may_be_the_peer(tiny_llm, foreign, capsys, tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    foreign(0.0)
    argv = [*SMALL, "--rounds", "2", "--compare", f"{sys.executable} '{program}'"]
    assert run(throughput, large(tiny_llm), *argv, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peer"].startswith("scripted, ")
    row = report["rows"][0]
    assert row["ratio"] == pytest.approx(1.0)  # both took 2 s, says the guard
    assert [r["engine"] for r in row["rounds"]] == ["leadframe", "leadframe", "peer", "peer"]
    assert 0 <= row["token_agreement"] < 1


@pytest.mark.parametrize("command", ["", "no-such-engine", "/dev/null"])
def test_a_peer_that_cannot_be_run_is_a_mistake_of_the_user(tiny_llm, command):
    with pytest.raises(ConfigError, match="--compare"):
        run(throughput, large(tiny_llm), *SMALL, "--compare", command)


def test_rounds_that_were_all_disturbed_give_a_direction_only(tiny_llm, foreign, capsys):
    foreign(0.5)
    assert run(throughput, large(tiny_llm), *SMALL, "--rounds", "2") == 0
    assert "all rounds disturbed (over 10% foreign load); direction only" in capsys.readouterr().out


def test_latency_is_marked_too(tiny_llm, foreign, capsys):
    llm = large(tiny_llm)
    foreign(0.5)
    assert run(latency, llm, "--rounds", "2", "--max-tokens", "3") == 0
    assert "all rounds disturbed" in capsys.readouterr().out
    foreign(0.0)
    assert run(latency, llm, "--rounds", "2", "--max-tokens", "3") == 0
    assert "disturbed" not in capsys.readouterr().out
    assert run(latency, llm, "--rounds", "2", "--max-tokens", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["foreign_fractions"] == [0.0, 0.0]


def test_some_rounds():
    assert disturbance([0.0, 0.1]) == ""
    assert disturbance([0.0, 0.2, 0.0]).startswith("1 of 3 rounds had over 10% foreign load")
