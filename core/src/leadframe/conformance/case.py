"""A conformance case: one thing that a backend must do, with an id that never changes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from leadframe.conformance.kit import Kit

Tier = Literal["core", "full", "perf"]
TIERS: Final[tuple[Tier, ...]] = ("core", "full", "perf")

GROUPS: Final = {
    "A": "load and hygiene",
    "B": "op numerics",
    "C": "memory",
    "D": "graph",
    "E": "engine",
    "F": "determinism",
    "G": "failure injection",
    "H": "roofline",
    "I": "capability honesty",
    "J": "contract evolution",
}


class ConformanceFailure(AssertionError):
    """The backend did something that the contract forbids."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts what was tried in front of what failed inside."""
    try:
        yield
    except ConformanceFailure as failure:
        raise ConformanceFailure(f"{what}: {failure}") from failure


def _always(kit: Kit) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
      id: GROUP.subject[parameters]; stable, because notes and reports refer to it.
      run: raises `ConformanceFailure` when the backend is wrong.
      tier: the smallest tier that contains it.
      not_claimed: a reason why this backend need not pass, from its own capabilities, or None.
    """

    id: str
    run: Callable[[Kit], None]
    tier: Tier = "core"
    not_claimed: Callable[[Kit], str | None] = _always

    @property
    def group(self) -> str:
        """The letter of its group."""
        return self.id[0]


def matches(case_id: str, pattern: str) -> bool:
    """Whether an id is a pattern, starts with it, or matches it as a glob."""
    # brackets are part of ids, so they are no glob syntax here
    glob = pattern.replace("[", "[[]")
    return case_id.startswith(pattern) or fnmatch.fnmatchcase(case_id, glob)


def in_tier(cases: Iterable[Case], tier: Tier) -> list[Case]:
    """Returns the cases of a tier, which contains the smaller ones."""
    limit = TIERS.index(tier)
    return [case for case in cases if TIERS.index(case.tier) <= limit]


__all__ = ["GROUPS", "TIERS", "Case", "ConformanceFailure", "Tier", "in_tier", "matches", "naming"]
