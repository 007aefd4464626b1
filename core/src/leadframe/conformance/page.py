"""The report as one self-contained page: verdict, support matrix, failures, roofline."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leadframe.conformance.case import GROUPS

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;
text-align:left;vertical-align:top}th{background:#f4f4f4}code{background:#f4f4f4;padding:0 .2rem}
.passed{background:#dff3e0}.failed{background:#f9d6d5}.not{background:#eee;color:#666}
.expected{background:#fdf0cf}.badge{display:inline-block;padding:.3rem .8rem;border-radius:.4rem}
"""
_CLASS = {
    "passed": "passed",
    "failed": "failed",
    "not claimed": "not",
    "expected failure": "expected",
}
_MARK = {"passed": "yes", "failed": "FAIL", "not claimed": "–", "expected failure": "xfail"}


def render(report: Mapping[str, Any]) -> str:
    """Returns the page."""
    title = f"Leadframe conformance: {report['device']}"
    parts = [
        f"<h1>{_e(title)}</h1>",
        _head(report),
        "<h2>Groups</h2>",
        _groups(report),
        "<h2>Support matrix</h2>",
        _matrix(report["results"]),
        _failures(report["results"]),
        _roofline(report["results"]),
        "<h2>Ops</h2>",
        _ops(report["ops"]),
        "<h2>Capabilities and machine</h2>",
        _pairs({**report["capabilities"], **report["machine"]}),
    ]
    head = f"<meta charset=utf-8><title>{_e(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _e(value: object) -> str:
    return html.escape(str(value))


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{_e(name)}</th>" for name in header)
    return f"<table><tr>{cells}</tr>{''.join(rows)}</table>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [f"<tr><th>{_e(k)}</th><td>{_e(v)}</td></tr>" for k, v in values.items()]
    return f"<table>{''.join(rows)}</table>"


def _head(report: Mapping[str, Any]) -> str:
    kind = "passed" if report["verdict"] == "conformant" else "failed"
    badge = f"{report['tier']} tier: {report['verdict']} — evidence: {report['evidence']}"
    plugin = report.get("platform") or {}
    facts = {
        "distribution": f"{plugin.get('distribution', '')} {plugin.get('version', '')}",
        "contract": ".".join(str(part) for part in report["contract"]),
        "observed": report["observation"],
        "seed": report["seed"],
        "seconds": report["seconds"],
    }
    return f"<p class='badge {kind}'><b>{_e(badge)}</b></p>{_pairs(facts)}"


def _groups(report: Mapping[str, Any]) -> str:
    rows = []
    for group, counts in report["summary"].items():
        cells = "".join(
            f"<td class={_CLASS[name] if count else 'none'}>{count}</td>"
            for name, count in counts.items()
        )
        rows.append(f"<tr><th>{group}: {_e(GROUPS[group])}</th>{cells}</tr>")
    return _table(["group", *_CLASS], rows)


def _matrix(results: Sequence[Mapping[str, Any]]) -> str:
    """One row a subject, one cell a case."""
    rows: dict[str, list[str]] = {}
    for result in results:
        subject, _, rest = result["id"].partition("[")
        name = rest.rstrip("]") or "·"
        tip = _e(result["reason"])
        cell = f'<span class={_CLASS[result["outcome"]]} title="{tip}">{_e(name)} '
        rows.setdefault(subject, []).append(f"{cell}{_MARK[result['outcome']]}</span>")
    lines = [f"<tr><th>{_e(s)}</th><td>{' · '.join(cells)}</td></tr>" for s, cells in rows.items()]
    return _table(["subject", "cases"], lines)


def _failures(results: Sequence[Mapping[str, Any]]) -> str:
    failed = [result for result in results if result["outcome"] == "failed"]
    if not failed:
        return ""
    rows = [
        f"<tr><td>{_e(r['id'])}</td><td>{_e(r['reason'])}<br><code>{_e(r['rerun'])}</code></td></tr>"
        for r in failed
    ]
    return f"<h2>Failures</h2>{_table(['case', 'what happened'], rows)}"


def _ops(ops: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for op in ops:
        passed_over = "; ".join(f"{name}: {why}" for name, why in op["passed_over"])
        cells = (op["op"], op["implementation"], passed_over)
        rows.append(f"<tr>{''.join(f'<td>{_e(cell)}</td>' for cell in cells)}</tr>")
    return _table(["op", "implementation", "passed over"], rows)


# --- roofline ---------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 60


class _Axes:
    """Maps intensity and FLOP/s to pixels, both logarithmic."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = _decades(xs)
        self.y0, self.y1 = _decades(ys)

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return _MARGIN + share * (_WIDTH - 2 * _MARGIN)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _roofline(results: Sequence[Mapping[str, Any]]) -> str:
    metrics = {result["id"]: result["metrics"] for result in results}
    rates = metrics.get("H.device[rates]") or {}
    if "memory_bytes_per_second" not in rates:
        return ""
    bandwidth, peak = rates["memory_bytes_per_second"], rates["matmul_flop_per_second"]
    points = list(_points(metrics))
    xs = [0.1, 1000.0, *(x for _, x, _ in points)]
    ys = [peak, bandwidth * 0.1, *(y for _, _, y in points)]
    axes = _Axes(xs, ys)
    ridge = peak / bandwidth
    left, right = 10.0**axes.x0, 10.0**axes.x1
    floor = max(left * bandwidth, 10.0**axes.y0)
    start = floor / bandwidth
    path = (
        f"M{axes.x(start):.1f} {axes.y(floor):.1f} L{axes.x(ridge):.1f} {axes.y(peak):.1f} "
        f"L{axes.x(right):.1f} {axes.y(peak):.1f}"
    )
    body = "".join(
        [
            *_grid(axes),
            f"<path d='{path}' fill=none stroke=#444 stroke-width=2 />",
            *_dots(axes, points),
        ]
    )
    caption = f"memory {bandwidth / 1e9:.1f} GB/s, matmul {peak / 1e9:.1f} GFLOP/s, measured here"
    svg = (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width={_WIDTH} role=img "
        f"aria-label='roofline plot'>{body}</svg>"
    )
    return f"<h2>Roofline</h2><p>{_e(caption)}</p>{svg}"


def _points(metrics: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """(name, FLOP per byte, FLOP per second) of what was measured."""
    decode = metrics.get("H.attention[decode]") or {}
    if "bytes_per_second" in decode:
        # each K and V element of two or four bytes takes two operations per query head of its group
        intensity = max(decode["intensity"], 0.1)
        yield "decode attention", intensity, decode["bytes_per_second"] * intensity
    prefill = metrics.get("H.attention[prefill]") or {}
    if "flop_per_second" in prefill:
        yield "prefill attention", 256.0, prefill["flop_per_second"]


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    for decade in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**decade)
        yield f"<line x1={x:.1f} y1={_MARGIN} x2={x:.1f} y2={bottom} stroke=#ddd />"
        yield _text(x, bottom + 18, f"{10.0**decade:g}", "middle")
    for decade in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**decade)
        yield f"<line x1={_MARGIN} y1={y:.1f} x2={right} y2={y:.1f} stroke=#ddd />"
        yield _text(_MARGIN - 6, y + 4, f"1e{decade}", "end")
    yield _text(_WIDTH / 2, _HEIGHT - 16, "FLOP per byte", "middle")
    yield _text(14, _MARGIN - 20, "FLOP per second", "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x={x:.1f} y={y:.1f} font-size=12 text-anchor={anchor}>{_e(text)}</text>"


def _dots(axes: _Axes, points: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    for name, x, y in points:
        yield f"<circle cx={axes.x(x):.1f} cy={axes.y(y):.1f} r=5 fill=#c33 />"
        yield _text(axes.x(x) + 8, axes.y(y) + 4, name, "start")


__all__ = ["render"]
