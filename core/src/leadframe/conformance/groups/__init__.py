"""The cases of every group."""

from __future__ import annotations

from leadframe.conformance.case import Case, matches
from leadframe.conformance.groups import (
    a_hygiene,
    b_attention,
    b_exact,
    b_layers,
    b_sampling,
    c_machine,
    c_memory,
    d_graph,
    e_engine,
    e_ranks,
    e_serving,
    f_determinism,
    g_failures,
    h_roofline,
    i_honesty,
    j_evolution,
    ranks,
)

_MODULES = (
    a_hygiene,
    b_attention,
    b_exact,
    b_layers,
    b_sampling,
    c_machine,
    c_memory,
    d_graph,
    e_engine,
    e_ranks,
    e_serving,
    f_determinism,
    g_failures,
    h_roofline,
    i_honesty,
    j_evolution,
    ranks,
)


def all_cases() -> list[Case]:
    """Returns every case, in the order of the groups."""
    from leadframe.conformance.fuzz import FUZZ

    cases = [case for module in _MODULES for case in module.CASES]
    return [*sorted(cases, key=lambda case: case.group), FUZZ]


def select(cases: list[Case], pattern: str) -> list[Case]:
    """Returns the cases whose id matches."""
    return [case for case in cases if matches(case.id, pattern)]


__all__ = ["all_cases", "select"]
