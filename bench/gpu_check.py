"""Runs the stages of the GPU check within a time limit, each in a process of its own.

A stage that fails or runs out of time costs its own numbers and no other's.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_DECODE, _PREFILL = "decode_share_of_copy_bandwidth", "prefill_share_of_matmul_peak"
_GAP = "host_gap_microseconds"
GOALS = {_DECODE: 0.75, _PREFILL: 0.60, _GAP: 300.0}


@dataclass(frozen=True)
class Plan:
    """How to run.

    Attributes:
      device: the platform's name.
      dry_run: interpret the kernels on the host, at toy sizes.
      folder: where stages leave their reports.
      deadline: `time.monotonic()` at which everything must be over.
    """

    device: str
    dry_run: bool
    folder: Path
    deadline: float

    @property
    def selected(self) -> str:
        """The `--device` value."""
        return f"{self.device}:interpreter" if self.dry_run else self.device

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())


_ATTENTION = {
    "features": ("window", "softcap"),
    "shapes": ("dim", "gqa", "edges"),
    "types": ("block", "float", "bfloat", "kv", "other"),
    "poison": ("poison", "null", "large"),
    "layouts": ("decode", "prefill", "chunked", "mixed", "one", "shared", "long"),
}
"""Prefixes of the attention cases: each process compiles its own share of the kernels."""

KIT_WAVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    # Groups that only compute may share the GPU; memory and failures want it alone.
    (
        ("A.", "I.", "J.", "B.ranks"),
        *(tuple(f"B.attention[{part}" for part in parts) for parts in _ATTENTION.values()),
        ("B.exact",),
        ("B.layer",),
        ("B.kv_copy", "B.sample", "B.argmax", "B.finite_rows", "B.topk", "B.fuzz"),
        ("B.edit_logits", "B.mask_logits"),
        ("D.",),
        ("E.", "F."),
    ),
    (("C.", "G."),),
)
DRY_WAVES = ((("B.exact[decode-self", "I."), ("F.",)), (("C.kv_alloc",),))


WARM_UPS = (("roofline",), ("engine", "--shape", "1b"), ("engine", "--shape", "8b"))
"""Later stages' kernels are compiled while the kit runs: that takes cores, and little of a GPU."""


def kit(plan: Plan, limit: float) -> dict[str, Any]:
    """The conformance kit, tier full, its groups side by side."""
    ends = time.monotonic() + limit

    def wait(process: Any) -> bool:
        return _wait(process, max(1.0, ends - time.monotonic()))

    out: dict[str, Any] = {"passed": 0, "failed": [], "unfinished": [], "evidence": []}
    warming = [] if plan.dry_run else [_start_warm_up(plan, *words) for words in WARM_UPS]
    for wave in DRY_WAVES if plan.dry_run else KIT_WAVES:
        running = [(cases, *_start_kit(plan, cases, index)) for index, cases in enumerate(wave)]
        for cases, process, report in running:
            _merge_kit(out, cases, report, wait(process))
        # Before the next wave, which looks at memory, and before anything is timed.
        out["warm"] = out.get("warm", 0) + sum(wait(p) and not p.returncode for p in warming)
        warming = []
    out["evidence"] = sorted(set(out["evidence"]))
    out["conformant"] = not out["failed"] and not out["unfinished"] and out["passed"] > 0
    return out


def _start_warm_up(plan: Plan, name: str, *arguments: str) -> Any:
    report = plan.folder / f"warm-{name}{''.join(arguments)}.json"
    command = [sys.executable, str(HERE / f"gpu_{name}.py"), "--report", str(report), "--warm"]
    command += ["--device", plan.selected, *arguments]
    return _start(command, report.with_suffix(".log"))


def _start_kit(plan: Plan, cases: tuple[str, ...], index: int) -> tuple[Any, Path]:
    report = plan.folder / f"kit-{cases[0][0]}{index}.json"
    command = [sys.executable, "-m", "leadframe.cli.main", "conformance", plan.selected]
    command += ["--tier", "full", "--report", str(report)]
    command += [] if plan.dry_run else ["--require-hardware"]
    command += [text for case in cases for text in ("--case", case)]
    return _start(command, report.with_suffix(".log")), report


def _merge_kit(out: dict[str, Any], cases: Any, report: Path, is_finished: bool) -> None:
    if not report.exists():
        log = report.with_suffix(".log").read_text()[-300:]
        out["unfinished"].append({"cases": cases, "timed_out": not is_finished, "log": log})
        return
    found = json.loads(report.read_text())
    out["evidence"].append(found["evidence"])
    for row in found["results"]:
        if row["outcome"] == "failed":
            out["failed"].append({"case": row["id"], "reason": row["reason"][:300]})
        else:
            out["passed"] += 1


_RUNNING: list[subprocess.Popen[bytes]] = []
"""What was started; none of it outlives this process."""


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as target:
        process = subprocess.Popen(command, stdout=target, stderr=subprocess.STDOUT)
    _RUNNING.append(process)
    return process


def _end_all() -> None:
    for process in _RUNNING:
        if process.poll() is None:
            process.kill()
            process.wait()


def _leave(signum: int, frame: object) -> None:
    """Ends at once and in order: what is running is ended on the way out."""
    sys.exit(128 + signum)


def _wait(process: Any, seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def script(name: str, *arguments: str) -> Callable[[Plan, float], dict[str, Any]]:
    """A stage that is a script of this folder; it rewrites its report as it goes."""

    def run(plan: Plan, limit: float) -> dict[str, Any]:
        tag = "-".join((name, *arguments)).replace("--", "")
        report = plan.folder / f"{tag}.json"
        command = [sys.executable, str(HERE / f"gpu_{name}.py"), "--report", str(report)]
        command += ["--device", plan.selected, *arguments, *(["--toy"] if plan.dry_run else [])]
        process = _start(command, report.with_suffix(".log"))
        is_finished = _wait(process, limit)
        out = json.loads(report.read_text()) if report.exists() else {}
        if not is_finished:
            out["error"] = f"stopped after {limit:.0f} s"
        elif process.returncode:
            out["error"] = report.with_suffix(".log").read_text()[-600:]
        return out

    return run


STAGES: dict[str, tuple[Callable[[Plan, float], dict[str, Any]], float]] = {
    "facts": (script("facts"), 30.0),
    "kit": (kit, 85.0),
    "roofline": (script("roofline"), 60.0),
    "engine_1b": (script("engine", "--shape", "1b"), 45.0),
    "engine_8b": (script("engine", "--shape", "8b"), 60.0),
}
"""Stage → what runs it, and the most seconds it may take."""


def check(plan: Plan, stages: list[str], target: Path) -> dict[str, Any]:
    """Runs stages in order and writes the result after each."""
    result: dict[str, Any] = {
        "schema": 1,
        "device": plan.selected,
        "dry_run": plan.dry_run,
        "stages": {},
    }
    for name in stages:
        run, most = STAGES[name]
        started = time.monotonic()
        try:
            limit = min(most, plan.left) if not plan.dry_run else plan.left
            outcome = run(plan, limit) if limit > 1 else {"error": "no time left"}
        except Exception as error:  # the next stage still counts
            outcome = {"error": f"{type(error).__name__}: {error}"}
        result["stages"][name] = outcome
        result["goals"] = compare(result["stages"])
        outcome["seconds"] = round(time.monotonic() - started, 1)
        _write(target, result)
        _say(name, outcome)
    return result


def has_error(value: Any) -> bool:
    """Whether an "error" is anywhere in a stage's outcome."""
    if isinstance(value, dict):
        return "error" in value or any(has_error(part) for part in value.values())
    return isinstance(value, list) and any(has_error(part) for part in value)


def compare(stages: dict[str, Any]) -> dict[str, Any]:
    """What was measured for each goal, and whether it is met; only what was measured."""
    problems = stages.get("roofline", {}).get("problems", {})
    decode = problems.get("decode 32x1@4096 H32/8 D128", {}).get("share_of_copy_bandwidth")
    prefill = problems.get("prefill 1x8192@8192 H32/8 D128", {}).get("share_of_matmul_peak")
    gaps = [
        row["host_gap_microseconds"]
        for name in ("engine_1b", "engine_8b")
        for row in stages.get(name, {}).values()
        if isinstance(row, dict) and "host_gap_microseconds" in row
    ]
    found = {
        _DECODE: (decode, decode and decode >= GOALS[_DECODE]),
        _PREFILL: (prefill, prefill and prefill >= GOALS[_PREFILL]),
        _GAP: (max(gaps, default=None), gaps and max(gaps) < GOALS[_GAP]),
    }
    return {
        name: {"measured": measured, "goal": GOALS[name], "met": bool(met)}
        for name, (measured, met) in found.items()
        if measured is not None
    }


def _write(target: Path, result: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, target)


def _say(name: str, outcome: dict[str, Any]) -> None:
    print(f"== {name} ({outcome['seconds']} s)", flush=True)
    for key, value in outcome.items():
        if key != "seconds":
            print(f"   {key}: {json.dumps(value)[:400]}", flush=True)


def why_no_device(device: str) -> str:
    """Why there is nothing to check here; empty where there is a device."""
    from leadframe.errors import LeadframeError
    from leadframe.platform.selection import select_device

    try:
        select_device(device, os.environ)
    except LeadframeError as error:
        return f"{str(error).splitlines()[0]}\n--dry-run goes through it in the interpreter"
    return ""


def main() -> int:
    """Returns 0 when every stage that was asked for ran without an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "rocm"))
    parser.add_argument("--seconds", type=float, default=None, help="time limit; default 180")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--dry-run", action="store_true", help="interpreter, toy sizes, no GPU")
    parser.add_argument("--report", type=Path, default=None)
    args = parser.parse_args()
    stages = [name for name in args.stages.split(",") if name]
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        parser.error(f"unknown stages {', '.join(unknown)}; there are {', '.join(STAGES)}")
    name = "gpu_check_dry_run.json" if args.dry_run else "gpu_check.json"
    target = args.report or HERE / "results" / name
    seconds = args.seconds or (1800.0 if args.dry_run else 180.0)
    if not args.dry_run and (problem := why_no_device(args.device)):
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    atexit.register(_end_all)
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(args.device, args.dry_run, Path(folder), time.monotonic() + seconds)
        result = check(plan, stages, target)
    failed = [name for name, stage in result["stages"].items() if has_error(stage)]
    print(f"results: {target}" + (f"; with errors: {', '.join(failed)}" if failed else ""))
    conformant = result["stages"].get("kit", {}).get("conformant", True)
    return 1 if failed or not conformant else 0


if __name__ == "__main__":
    sys.exit(main())
