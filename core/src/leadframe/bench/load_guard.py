"""Notices foreign load, so that a figure measured on a busy machine is not taken for a fact."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

BUSY_FRACTION = 0.10
"""Foreign load above which a round is marked as disturbed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed stretch.

    Attributes:
      seconds: wall time.
      foreign_fraction: share of all cores that other processes used meanwhile, 0 to 1.
    """

    seconds: float
    foreign_fraction: float


class LoadGuard:
    """Times a stretch and measures what other processes did meanwhile.

    Args:
      pids: processes, with this one, whose work is not foreign.
    """

    def __init__(self, *pids: int) -> None:
        self._own = [psutil.Process(pid) for pid in (os.getpid(), *pids)]
        self.restart()

    def restart(self) -> None:
        """Starts a new stretch."""
        self._start, self._busy, self._mine = time.perf_counter(), _busy(), self._own_seconds()

    def sample(self) -> Sample:
        """Ends the stretch."""
        seconds = time.perf_counter() - self._start
        foreign = (_busy() - self._busy) - (self._own_seconds() - self._mine)
        capacity = seconds * (os.cpu_count() or 1)
        return Sample(seconds, max(0.0, foreign / capacity) if capacity else 0.0)

    def _own_seconds(self) -> float:
        total = 0.0
        for process in self._own:
            times = process.cpu_times()
            total += times.user + times.system
        return total


def _busy() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - getattr(times, "guest", 0.0))


def disturbance(fractions: Sequence[float]) -> str:
    """Says how far rounds can be believed.

    Args:
      fractions: the foreign load of each round.

    Returns:
      One line, or nothing when every round was quiet.
    """
    disturbed = sum(fraction > BUSY_FRACTION for fraction in fractions)
    if not disturbed:
        return ""
    if disturbed == len(fractions):
        return (
            f"all rounds disturbed (over {BUSY_FRACTION:.0%} foreign load); direction only: run "
            "again on a quiet machine"
        )
    return (
        f"{disturbed} of {len(fractions)} rounds had over {BUSY_FRACTION:.0%} foreign load: run "
        "again on a quiet machine"
    )
