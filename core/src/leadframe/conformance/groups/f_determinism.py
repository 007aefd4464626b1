"""Group F: the same call gives the same bits, if that is claimed; measured in any case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from leadframe.conformance.attention_cases import Problem, Shape, make_problem, solve
from leadframe.conformance.batches import Padding, make_batch
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import LAYOUTS, fit
from leadframe.conformance.groups.b_layers import in_step
from leadframe.conformance.groups.b_sampling import draw, draw_rows
from leadframe.conformance.kit import Kit

_RERUNS = 4


def _difference(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())


def _reruns(kit: Kit, capture: bool) -> None:
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng)
    outs = [solve(kit, problem, capture).out[problem.live] for _ in range(_RERUNS)]
    worst = max(_difference(outs[0], out) for out in outs[1:])
    kit.metrics["rerun_difference"] = worst
    if kit.backend.caps.deterministic:
        kit.check(worst == 0.0, f"claims to be deterministic; attention reruns differ by {worst:g}")


def _linear_reruns(kit: Kit) -> None:
    rng = kit.rng
    arrays = {
        "x": kit.backend.upload(rng.standard_normal((64, 512)).astype(np.float32), kit.dtype),
        "w": kit.backend.upload(rng.standard_normal((256, 512)).astype(np.float32), kit.dtype),
    }
    outs = [
        in_step(kit, lambda ops, a: ops.linear(a["x"], a["w"]), arrays)[0] for _ in range(_RERUNS)
    ]
    worst = max(_difference(outs[0], out) for out in outs[1:])
    kit.metrics["rerun_difference"] = worst
    if kit.backend.caps.deterministic:
        kit.check(worst == 0.0, f"claims to be deterministic; linear reruns differ by {worst:g}")


def _one_row(problem: Problem, row: int) -> Problem:
    """The same row of a problem, alone in its batch."""
    spec, live = problem.spec, problem.live
    start = sum(r.num_tokens for r in spec.rows[:row])
    tokens = live[start : start + spec.rows[row].num_tokens]
    alone = replace(
        spec,
        rows=(spec.rows[row],),
        num_decodes=1 if row < spec.num_decodes else 0,
        padding=Padding(),
    )
    parts = {name: getattr(problem, name)[tokens] for name in ("q", "k", "v")}
    return replace(problem, spec=alone, batch=make_batch(alone), **parts)


def _batch_invariance(kit: Kit) -> None:
    """Each row alone gives the bits that it gives in a batch."""
    shape = Shape(decodes=(33, 1, 70), chunks=((20, 20), (7, 39)))
    problem = make_problem(fit(kit, shape), kit.rng, 0.0)
    together = solve(kit, problem).out[problem.live]
    worst, start = 0.0, 0
    for row, item in enumerate(problem.spec.rows):
        alone = solve(kit, _one_row(problem, row)).out
        worst = max(worst, _difference(alone, together[start : start + item.num_tokens]))
        start += item.num_tokens
    kit.metrics["batch_difference"] = worst
    if kit.backend.caps.batch_invariant:
        kit.check(worst == 0.0, f"claims to be batch-invariant; rows differ by {worst:g}")


def _linear_batch_invariance(kit: Kit) -> None:
    """Each row of a product alone, and in batches of any size, has the same bits."""
    rows = 70
    x = kit.rng.standard_normal((rows, 520)).astype(np.float32)
    weight = kit.backend.upload(
        kit.rng.standard_normal((136, 520)).astype(np.float32), kit.dtype, role="linear"
    )

    def product(part: Any) -> Any:
        given = {"x": kit.backend.upload(np.ascontiguousarray(part), kit.dtype), "w": weight}
        return in_step(kit, lambda ops, a: ops.linear(a["x"], a["w"]), given)[0]

    together = product(x)
    worst = max(
        _difference(product(x[start:end]), together[start:end])
        for start, end in ((0, 1), (69, 70), (3, 5), (10, 27), (0, 64))
    )
    kit.metrics["batch_difference"] = worst
    if kit.backend.caps.batch_invariant:
        kit.check(worst == 0.0, f"claims to be batch-invariant; linear's rows differ by {worst:g}")


def _sampling(kit: Kit) -> None:
    """Draws are exact functions of logits and uniforms."""
    rows = draw_rows(kit.rng, 1500, "threshold")
    first, _ = draw(kit, rows, "threshold")
    for _ in range(_RERUNS - 1):
        again, _ = draw(kit, rows, "threshold")
        kit.same("tokens drawn again", again, first)


CASES = [
    Case("F.rerun[attention]", lambda kit: _reruns(kit, capture=False)),
    Case("F.rerun[attention-captured]", lambda kit: _reruns(kit, capture=True)),
    Case("F.rerun[linear]", _linear_reruns),
    Case("F.rerun[sample]", _sampling),
    Case("F.batch-invariance[attention]", _batch_invariance),
    Case("F.batch-invariance[linear]", _linear_batch_invariance),
]
