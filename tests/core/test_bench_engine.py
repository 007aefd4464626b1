"""The benchmarks of an engine: keys, progress, and the mark of rounds that others disturbed."""

import json
import re
import sys
from argparse import ArgumentParser

import pytest

from leadframe.bench import latency, throughput
from leadframe.bench.load_guard import LoadGuard, Sample, disturbance
from leadframe.bench.peer import Peer
from leadframe.bench.workloads import Workload
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


@pytest.mark.parametrize("command", ["", "no-such-engine", "/dev/null", "python 'peer.py"])
def test_a_peer_that_cannot_be_run_is_a_mistake_of_the_user(tiny_llm, command):
    with pytest.raises(ConfigError, match="--compare"):
        run(throughput, large(tiny_llm), *SMALL, "--compare", command)


BAD_PEERS = {
    "print('loading', flush=True)": "printed 'loading'",
    "print('[1]', flush=True)": "JSON object with 'name'",
    "sys.stdout.buffer.write(b'\\xff\\n')": "printed",
    "hello(); sys.stdin.close()": "ended with status 0",
    "hello(); sys.exit(4)": "ended with status 4",
    "hello(); answer('50%')": "printed '\"50%\"'",
    "hello(); answer({'token_ids': None})": "not a list of lists",
    "hello(); answer({'token_ids': []})": "2 prompts with 0 tokens in 0 rows",
    "hello(); answer({'token_ids': [[7], [7]]})": "exactly 3 for each",
}


@pytest.mark.parametrize("does", BAD_PEERS)
def test_a_peer_that_does_not_speak_the_protocol_ends_the_run_in_one_line(tmp_path, does):
    program = tmp_path / "peer.py"
    program.write_text(
        "import json, sys\n"
        "def hello(): print(json.dumps({'name': 'bad'}), flush=True)\n"
        "def answer(reply): sys.stdin.readline(); print(json.dumps(reply), flush=True)\n" + does
    )
    workload = Workload("batch", [[1, 2], [3]], 3)
    wanted = re.escape(BAD_PEERS[does])
    with (
        pytest.raises(ConfigError, match=wanted) as raised,
        Peer([sys.executable, str(program)], "model", 1) as peer,
    ):
        peer.run(workload)
    assert "\n" not in str(raised.value)


def test_a_peer_that_is_gone_when_it_is_asked_is_reported(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text("""print('{"name": "short"}', flush=True)""")
    peer = Peer([sys.executable, str(program)], "model", 1)
    peer._process.wait(60)
    with pytest.raises(ConfigError, match="ended with status 0"):
        peer.run(Workload("batch", [[1, 2]], 3))
    peer.close()


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
