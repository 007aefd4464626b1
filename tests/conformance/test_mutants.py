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
from leadframe_sim.mutants import MUTANTS, Mutant
from leadframe_sim.mutants.base import OpMutant
from leadframe_sim.mutants.ranks import SharedReference

DOC = Path(__file__).parents[2] / "docs/backends/mutants.md"
CASES = {tier: in_tier(all_cases(), tier) for tier in ("core", "full")}


@pytest.fixture(autouse=True)
def _numpy_state():
    with np.errstate():
        yield


@pytest.fixture
def make_kit():
    """Makes the kit of a mutant, or of anything like it; ends its ranks."""
    made = []

    def make(mutant):
        backend = mutant.make or ReferenceBackend
        probe = ("--device", "mutant", "--object", mutant.plugin, "--distribution", "leadframe-sim")
        kit = Kit(
            open=lambda: guard(validate_backend(backend(), mutant.name)),
            device=mutant.name,
            probe_args=probe if mutant.plugin else (),
        )
        made.append(kit)
        return kit

    yield make
    for kit in made:
        kit.close()


def first_failure(kit, group, tier):
    for case in CASES[tier]:
        if case.group == group:
            result = execute(kit, case)
            if result.outcome == "failed":
                return result
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_survives(name, make_kit):
    mutant = MUTANTS[name]
    found = first_failure(make_kit(mutant), mutant.group, mutant.tier)
    assert found is not None, f"{name} ({mutant.summary}) survives group {mutant.group}"
    assert found.reason
    if ".mutants.ranks:" in mutant.plugin:
        assert ".ranks[" in found.id, "alone it is sound"


@pytest.mark.parametrize("group", GROUPS)
def test_the_backends_that_mutants_are_made_from_are_clean(group):
    for make in (ReferenceBackend, _sim):
        kit = Kit(open=lambda make=make: guard(make()), device="clean")
        found = first_failure(kit, group, "core")
        assert found is None, f"{found}"


SOUND = Mutant("sound", "", "", SharedReference, "leadframe_sim.mutants.ranks:sound")


def test_the_ranks_that_mutants_are_made_from_are_clean(make_kit):
    kit = make_kit(SOUND)
    cases = [case for case in CASES["core"] if ".ranks[" in case.id]
    results = [execute(kit, case) for case in cases]
    assert {result.outcome for result in results} == {"passed"}, results
    assert kit.ranks is not None


@pytest.mark.parametrize("case_id", ["E.ranks[logits]", "E.ranks[repeated-heads]"])
def test_a_whole_model_shows_what_ranks_do_wrong(make_kit, case_id):
    (case,) = [case for case in CASES["core"] if case.id == case_id]
    result = execute(make_kit(MUTANTS["local-sum"]), case)
    assert "logits are off by" in result.reason


def test_a_product_that_depends_on_the_batch_is_seen(make_kit):
    """NumPy's own does, and claims nothing."""
    claims = Mutant("claims", "F", "", lambda: OpMutant({}, batch_invariant=True))
    (case,) = [case for case in CASES["core"] if case.id == "F.batch-invariance[linear]"]
    assert "linear's rows differ" in execute(make_kit(claims), case).reason


def test_only_a_long_context_shows_what_lies_far_back(make_kit):
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
