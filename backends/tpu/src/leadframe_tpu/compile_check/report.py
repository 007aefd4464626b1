"""The compile matrix, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from leadframe_tpu.compile_check.check import Verdict

_COLUMNS = ("target", "chips", "step", "result", "s", "arguments", "donated", "scratch", "program")
_COSTS = ("GFLOP", "GB", "≥ ms")


def format_matrix(verdicts: Sequence[Verdict]) -> str:
    """Returns a table with one line a step, and what is wrong below it."""
    rows = [(*_COLUMNS, *_COSTS), *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    out = lines[:1]
    for verdict, line in zip(verdicts, lines[1:], strict=True):
        out += [line, *(f"    {problem}" for problem in verdict.problems)]
    return "\n".join([*out, "", _legend(verdicts)])


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns the same as plain data, without the programs' text."""
    rows = []
    for verdict in verdicts:
        row = asdict(verdict)
        del row["text"]
        rows.append(row)
    return {"evidence": evidence(verdicts), "steps": rows}


def evidence(verdicts: Sequence[Verdict]) -> str:
    """Returns "compiled-only", or "lowered-only" if any step was not compiled."""
    is_weak = any(verdict.level == "lowered" for verdict in verdicts)
    return "lowered-only" if is_weak else "compiled-only"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
    return "  ".join(cells).rstrip()


def _row(verdict: Verdict) -> tuple[str, ...]:
    head = (verdict.target, str(verdict.ranks), verdict.case, _result(verdict))
    memory, cost = verdict.memory, verdict.cost
    if memory is None or cost is None:
        return (*head, *("",) * (len(_COLUMNS) - 4 + len(_COSTS)))
    sizes = (memory.arguments, memory.donated, memory.scratch, memory.code)
    return (
        *head,
        f"{verdict.seconds:.0f}",
        *(f"{size / 2**20:,.0f} MiB" for size in sizes),
        f"{cost.flops / 1e9:,.1f}",
        f"{cost.bytes_moved / 1e9:.2f}",
        f"{cost.least_seconds * 1e3:.2f}",
    )


def _result(verdict: Verdict) -> str:
    if verdict.level == "not applicable":
        return "n/a"
    if verdict.problems:
        return "WRONG"
    return "ok" if verdict.level == "compiled" else "lowered"


def _legend(verdicts: Sequence[Verdict]) -> str:
    good = sum(v.is_good for v in verdicts)
    lines = [
        f"{good} of {len(verdicts)} as they must be. Sizes are per device; a kernel counts as it "
        "declares itself, for block tables that are half full.",
        "Nothing was run: this shows that programs exist and fit, not that they are fast or right.",
    ]
    if evidence(verdicts) == "lowered-only":
        lines.append(
            "WEAKER: libtpu is not installed, so nothing was compiled. Layouts, copies of the "
            "cache, on-chip memory and alignment are unchecked; pip install libtpu to check them."
        )
    return "\n".join(lines)
