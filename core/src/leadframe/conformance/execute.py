"""Runs one case and says what became of it."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

from leadframe.conformance.case import Case, ConformanceFailure
from leadframe.conformance.kit import Kit

Outcome = Literal["passed", "failed", "not claimed", "expected failure"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case.

    Attributes:
      id: the case.
      tier: the smallest tier that contains it.
      outcome: "not claimed" is a case that the backend's own capabilities exclude.
      reason: why, for everything but "passed".
      seconds: how long it took.
      rerun: one command line that repeats it.
      metrics: what was measured.
    """

    id: str
    tier: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    rerun: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


def rerun_line(kit: Kit, case: Case) -> str:
    """Returns the command that repeats a case."""
    options = "".join(f" -o {pair}" for pair in kit.options)
    return (
        f"leadframe conformance {kit.device} --tier {case.tier} --case '{case.id}' "
        f"--seed {kit.seed}{options}"
    )


def execute(kit: Kit, case: Case) -> Result:
    """Runs a case under the rules for notes.

    A note that calls a case unsupported must agree with the capabilities. An expected failure
    that passes is a failure. The core tier can be neither skipped nor expected to fail.
    """
    kit.case_id, kit.metrics = case.id, {}
    started = time.perf_counter()
    outcome, reason = _outcome(kit, case)
    return Result(
        id=case.id,
        tier=case.tier,
        outcome=outcome,
        reason=reason,
        seconds=round(time.perf_counter() - started, 4),
        rerun=rerun_line(kit, case) if outcome == "failed" else "",
        metrics=dict(kit.metrics),
    )


def _outcome(kit: Kit, case: Case) -> tuple[Outcome, str]:
    try:
        not_claimed = case.not_claimed(kit)
    except Exception as error:
        return "failed", describe(error)
    if not_claimed is not None:
        return "not claimed", not_claimed
    unsupported, expected = kit.noted_unsupported(case.id), kit.expected_failure(case.id)
    if unsupported is not None:
        return "failed", f"noted as unsupported ({unsupported}), but the capabilities claim it"
    if expected is not None and case.tier == "core":
        return "failed", f"the core tier cannot be expected to fail ({expected})"
    failure = _run(kit, case)
    if expected is not None:
        if failure is None:
            return "failed", f"was expected to fail ({expected}) and passes: remove the note"
        return "expected failure", f"{expected}: {failure}"
    return ("passed", "") if failure is None else ("failed", failure)


def _run(kit: Kit, case: Case) -> str | None:
    try:
        case.run(kit)
    except Exception as error:
        return describe(error)
    return None


def describe(error: Exception) -> str:
    """Returns one line: what a case says is wrong, or what was raised and where."""
    if isinstance(error, ConformanceFailure):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames[::-1])
    return f"{type(error).__name__}: {error} [{where}]"


__all__ = ["Outcome", "Result", "describe", "execute", "rerun_line"]
