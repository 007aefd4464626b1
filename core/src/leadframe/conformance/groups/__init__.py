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
    e_serving,
    f_determinism,
    g_failures,
    h_roofline,
    i_honesty,
    j_evolution,
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
    e_serving,
    f_determinism,
    g_failures,
    h_roofline,
    i_honesty,
    j_evolution,
)


def all_cases() -> list[Case]:
    """Returns every case, in the order of the groups."""
    from leadframe.conformance.fuzz import FUZZ

    return [*(case for module in _MODULES for case in module.CASES), FUZZ]


def select(cases: list[Case], pattern: str) -> list[Case]:
    """Returns the cases whose id matches."""
    return [case for case in cases if matches(case.id, pattern)]


__all__ = ["all_cases", "select"]
