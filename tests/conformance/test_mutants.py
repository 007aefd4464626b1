"""The kit catches every backend that is broken on purpose, in the group that owns the fault."""

from pathlib import Path

import numpy as np
import pytest

from leadframe.conformance.case import GROUPS, in_tier
from leadframe.conformance.execute import execute
from leadframe.conformance.groups import all_cases
from leadframe.conformance.kit import Kit
from leadframe.platform import guard, validate_backend
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe_sim.mutants import MUTANTS

DOC = Path(__file__).parents[2] / "docs/backends/mutants.md"
CASES = {tier: in_tier(all_cases(), tier) for tier in ("core", "full")}


@pytest.fixture(autouse=True)
def _numpy_state():
    with np.errstate():
        yield


def make_kit(mutant):
    make = mutant.make or ReferenceBackend
    probe = ("--device", "mutant", "--object", mutant.plugin, "--distribution", "leadframe-sim")
    return Kit(
        open=lambda: guard(validate_backend(make(), mutant.name)),
        device=mutant.name,
        probe_args=probe if mutant.plugin else (),
    )


def first_failure(kit, group, tier):
    for case in CASES[tier]:
        if case.group == group:
            result = execute(kit, case)
            if result.outcome == "failed":
                return result
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_survives(name):
    mutant = MUTANTS[name]
    found = first_failure(make_kit(mutant), mutant.group, mutant.tier)
    assert found is not None, f"{name} ({mutant.summary}) survives group {mutant.group}"
    assert found.reason


@pytest.mark.parametrize("group", GROUPS)
def test_the_backends_that_mutants_are_made_from_are_clean(group):
    for make in (ReferenceBackend, _sim):
        kit = Kit(open=lambda make=make: guard(make()), device="clean")
        found = first_failure(kit, group, "core")
        assert found is None, f"{found}"


def test_only_a_long_context_shows_what_lies_far_back():
    mutant = MUTANTS["near-only"]
    assert first_failure(make_kit(mutant), "B", "core") is None
    assert first_failure(make_kit(mutant), "B", "full").id == "B.attention[long-context]"


def _sim():
    from leadframe_sim.mutants.base import sim_backend

    return sim_backend()


def test_there_are_enough_of_them_and_they_cover_the_groups():
    assert len(MUTANTS) >= 30
    assert {mutant.group for mutant in MUTANTS.values()} >= set("ABCDEFGI")


def table():
    lines = ["| mutant | fault | caught by |", "|---|---|---|"]
    for mutant in sorted(MUTANTS.values(), key=lambda m: m.group):
        lines.append(
            f"| `{mutant.name}` | {mutant.summary} | {mutant.group}: {GROUPS[mutant.group]} |"
        )
    return "\n".join(lines)


def test_the_table_in_the_documentation_is_this_one():
    assert table() in DOC.read_text(), f"put this into {DOC}:\n{table()}"
