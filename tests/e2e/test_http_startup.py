"""`leadframe bench startup`, and a server that cannot start."""

import json

from leadframe.cli.main import main

SMALL = (
    "--device", "reference", "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "16",
)  # fmt: skip


def test_start_up_is_timed_phase_by_phase(tiny_model, capfd):
    argv = ["bench", "startup", "--rounds", "1", "--json", "--", str(tiny_model), *SMALL]
    assert main(argv) == 0
    (row,) = json.loads(capfd.readouterr().out)["rounds"]
    names = [phase["name"] for phase in row["phases"]]
    assert names == ["import", "load", "profile", "compile", "capture", "kv"]
    assert row["wall_seconds"] > row["total_seconds"] > 0
    assert row["other_seconds"] > 0
    assert row["device"].startswith("reference")


def test_a_server_that_does_not_start_is_reported(tmp_path, capfd):
    argv = ["bench", "startup", "--rounds", "1", "--", str(tmp_path / "no-model"), *SMALL]
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert "no-model" in err
    assert "ended with status 3 before it answered" in err
    assert "Traceback" not in err
