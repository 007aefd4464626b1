"""Backends and plugins that are broken on purpose, each in one way.

They prove the conformance kit: every one must be caught by the group that it names.
"""

from __future__ import annotations

from leadframe_sim.mutants import behaviour, claims, graph, memory, ops, plugins, ranks
from leadframe_sim.mutants.base import Mutant

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for module in (ops, claims, memory, graph, behaviour, plugins, ranks)
    for mutant in module.MUTANTS
}

__all__ = ["MUTANTS", "Mutant"]
