"""The report of a run: JSON with a schema version, and the rules that it must obey."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform as host
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from leadframe.conformance.case import GROUPS, TIERS, Case, Tier, _always, in_tier
from leadframe.conformance.evidence import LEVELS, evidence_level
from leadframe.conformance.execute import Result
from leadframe.conformance.kit import Kit
from leadframe.platform import CONTRACT, Capabilities

SCHEMA: Final = 1
_OUTCOMES = ("passed", "failed", "not claimed", "expected failure")


def caps_json(caps: Capabilities) -> dict[str, Any]:
    """Capabilities as plain data."""
    out = {f.name: getattr(caps, f.name) for f in fields(caps) if f.name != "why_not"}
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in out.items()}


def build_report(kit: Kit, results: Sequence[Result], tier: Tier, seconds: float) -> dict[str, Any]:
    """Assembles the report of a run."""
    level, observation = evidence_level(kit)
    info = asdict(kit.plugin.info()) if kit.plugin is not None else {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "contract": list(CONTRACT),
        "device": kit.device,
        "options": list(kit.options),
        "platform": info,
        "tier": tier,
        "seed": kit.seed,
        "seconds": round(seconds, 2),
        "evidence": level,
        "observation": observation,
        "capabilities": caps_json(kit.backend.caps),
        "ops": [{**c, "passed_over": list(c["passed_over"])} for c in kit.table.as_json()],
        "machine": _machine(info.get("distribution", "")),
        "results": [asdict(result) for result in results],
    }
    report["summary"] = summary(report["results"])
    report["verdict"] = verdict(report["results"], tier)
    report = json.loads(json.dumps(report, default=str))
    report["digest"] = digest(report)
    return report


def _machine(distribution: str) -> dict[str, Any]:
    names = ["leadframe", "numpy", *([distribution] if distribution else [])]
    names += [name for name in ("torch", "jax", "triton") if name in sys.modules]
    versions = {}
    for name in dict.fromkeys(names):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "system": host.platform(),
        "machine": host.machine(),
        "python": host.python_version(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts outcomes by group."""
    counts: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for result in results:
        counts[result["id"][0]][result["outcome"]] += 1
    return {g: {name: c[name] for name in _OUTCOMES} for g, c in counts.items() if c}


def verdict(results: Sequence[Mapping[str, Any]], tier: str) -> str:
    """Says "conformant" when every case of the tier ran and none failed; "partial" when not.

    A run that was narrowed to some cases proves nothing about the others.
    """
    if any(result["outcome"] == "failed" for result in results):
        return "failed"
    wanted = {case.id for case in in_tier(_cases(), tier)}  # type: ignore[arg-type]
    return "conformant" if wanted <= {result["id"] for result in results} else "partial"


def digest(report: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the digest: shows accidents, not malice."""
    rest = {key: value for key, value in report.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _cases() -> list[Case]:
    from leadframe.conformance.groups import all_cases

    return all_cases()


def verify(report: Mapping[str, Any]) -> list[str]:
    """Returns every rule that a report breaks."""
    if report.get("schema") != SCHEMA:
        return [f"schema is {report.get('schema')!r}; this kit reads {SCHEMA}"]
    missing = [key for key in ("results", "tier", "capabilities", "verdict") if key not in report]
    if missing:
        return [f"the report has no {key!r}" for key in missing]
    return [*_verify_frame(report), *_verify_results(report)]


def _verify_frame(report: Mapping[str, Any]) -> Iterator[str]:
    if report.get("digest") != digest(report):
        yield "the digest does not match: the report was changed after it was written"
    if report["tier"] not in TIERS:
        yield f"tier is {report['tier']!r}; it must be one of {TIERS}"
        return
    if report["verdict"] != verdict(report["results"], report["tier"]):
        found = verdict(report["results"], report["tier"])
        yield f"verdict is {report['verdict']!r}; the results say {found!r}"
    if report.get("summary") != summary(report["results"]):
        yield "the summary does not add up to the results"
    if report.get("evidence") not in LEVELS:
        yield f"evidence is {report.get('evidence')!r}; it must be one of {LEVELS}"
    said = report["capabilities"].get("simulated")
    if said and report.get("evidence") == "hardware":
        yield f"evidence is 'hardware', and the capabilities say {said!r}"


def _verify_results(report: Mapping[str, Any]) -> Iterator[str]:
    cases = {case.id: case for case in _cases()}
    seen = Counter(result["id"] for result in report["results"])
    for case_id, count in seen.items():
        if case_id not in cases:
            yield f"there is no case {case_id!r} in this kit"
        elif count > 1:
            yield f"case {case_id!r} appears {count} times"
    for result in report["results"]:
        case = cases.get(result["id"])
        if case is not None:
            yield from _verify_result(result, case, report["capabilities"])


def _verify_result(result: Mapping[str, Any], case: Case, caps: Mapping[str, Any]) -> Iterator[str]:
    outcome, reason = result["outcome"], result.get("reason", "")
    if outcome not in _OUTCOMES:
        yield f"{case.id}: outcome {outcome!r} is none of {_OUTCOMES}"
    if outcome != "passed" and not reason:
        yield f"{case.id}: {outcome} without a reason"
    if outcome == "expected failure" and case.tier == "core":
        yield f"{case.id}: the core tier cannot be expected to fail"
    if outcome == "not claimed":
        if case.not_claimed is _always:
            yield f"{case.id}: this case can be skipped by no capability"
        claimed = [
            f for f in caps.get("attention_features", ()) if f"{f!r} is not claimed" in reason
        ]
        if claimed:
            yield f"{case.id}: {reason}, but the capabilities list it"
        most = caps.get("tensor_parallel", 1)
        if "tensor_parallel is 1" in reason and most > 1:
            yield f"{case.id}: {reason}, but the capabilities say {most}"


def write_report(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Writes the JSON and, beside it, a page for people; returns both paths."""
    from leadframe.conformance.page import render

    path.write_text(json.dumps(report, indent=1) + "\n")
    page = path.with_suffix(".html")
    page.write_text(render(report))
    return [path, page]


__all__ = ["SCHEMA", "build_report", "digest", "summary", "verdict", "verify", "write_report"]
