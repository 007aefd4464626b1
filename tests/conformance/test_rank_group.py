"""Ranks under test: too few devices, ranks that hang or end, and none that outlives the kit."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from leadframe.conformance import rank_group
from leadframe.conformance.case import ConformanceFailure
from leadframe.conformance.execute import execute
from leadframe.conformance.groups import all_cases
from leadframe.conformance.kit import Kit
from leadframe.conformance.rank_group import group_of, no_processes, no_ranks
from leadframe_sim.mutants.ranks import SharedReference

SOUND = (
    "--device", "mutant", "--distribution", "leadframe-sim",
    "--object", "leadframe_sim.mutants.ranks:sound",
)  # fmt: skip
EMBED = next(case for case in all_cases() if case.id == "B.ranks[embed]")


@pytest.fixture
def kit():
    made = Kit(open=SharedReference, device="mutant", probe_args=SOUND)
    yield made
    made.close()


class Claims(SharedReference):
    """The same, with other claims."""

    def __init__(self, **changes):
        super().__init__()
        self._shared = replace(self._shared, **changes)


def pids(kit):
    return [rank._process.pid for rank in kit.ranks._ranks]


def is_there(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(numbers):
    end = time.monotonic() + 20
    while any(map(is_there, numbers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in numbers if is_there(pid)]


@pytest.mark.parametrize(
    ("changes", "args", "ranks", "processes"),
    [
        ({}, SOUND, None, None),
        ({}, (), "not loaded from a plugin", "not loaded from a plugin"),
        ({"tensor_parallel": 1}, SOUND, "no room here for a second", "no room here for a second"),
        (
            {"tensor_parallel": 1, "rank_processes": False},
            SOUND,
            "several devices for one model are not claimed",
            "rank_processes is not claimed",
        ),
        ({"rank_processes": False}, SOUND, None, "rank_processes is not claimed"),
    ],
)
def test_why_there_are_no_ranks(changes, args, ranks, processes):
    kit = Kit(open=lambda: Claims(**changes), probe_args=args)
    for found, wanted in ((no_ranks(kit), ranks), (no_processes(kit), processes)):
        assert found is None if wanted is None else wanted in found


def test_there_are_as_many_as_there_is_room_for(kit):
    assert group_of(kit).count == 3
    two = Kit(open=lambda: Claims(tensor_parallel=2), probe_args=SOUND)
    assert execute(two, EMBED).metrics["ranks"] == 2
    two.close()


def test_a_rank_that_ends_is_a_failed_case_and_the_next_has_new_ones(kit):
    assert execute(kit, EMBED).outcome == "passed"
    first = pids(kit)
    os.kill(first[1], signal.SIGKILL)
    wait_until_gone(first[1:2])
    result = execute(kit, EMBED)
    assert result.outcome == "failed"
    assert "ended" in result.reason
    wait_until_gone(first)
    assert execute(kit, EMBED).outcome == "passed"
    assert not set(first) & set(pids(kit))


def test_a_rank_that_hangs_is_named_and_ended(kit, monkeypatch):
    assert execute(kit, EMBED).outcome == "passed"
    numbers = pids(kit)
    monkeypatch.setattr(rank_group, "_SECONDS", 0.5)
    monkeypatch.setattr(rank_group, "_END_SECONDS", 0.1)
    os.kill(numbers[2], signal.SIGSTOP)
    result = execute(kit, EMBED)
    assert result.outcome == "failed"
    assert "embed: no answer of rank 0, 1, 2 within 0.5 s" in result.reason
    wait_until_gone(numbers)


def test_what_a_rank_says_is_what_the_case_says(kit):
    with pytest.raises(ConformanceFailure, match=r"embed: rank \d: KeyError: 'ids'"):
        group_of(kit).ask("embed", {"dtype": "float32"}, {})
    assert not kit.ranks.works


def test_ranks_end_with_a_kit_that_is_killed():
    script = f"""
import json, sys, time
from leadframe.conformance.kit import Kit
from leadframe.conformance.rank_group import group_of
from leadframe_sim.mutants.ranks import SharedReference
kit = Kit(open=SharedReference, device="mutant", probe_args={SOUND!r})
group = group_of(kit)
pids = [rank._process.pid for rank in group._ranks]
print(json.dumps([pids, group._folder]), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        numbers, folder = json.loads(process.stdout.readline())
        assert all(map(is_there, numbers))
        process.kill()
    wait_until_gone(numbers)
    assert not Path(folder).exists()
