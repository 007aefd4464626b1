"""Group D: compiled steps. Every attention case again from a graph, and what replay must refresh.

On a backend whose `compile` returns the function, these hold trivially; they run all the same.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np

from leadframe.conformance.attention_cases import (
    Outcome,
    Problem,
    Shape,
    attention_step,
    check_outcome,
    expected,
    make_problem,
    prepare,
)
from leadframe.conformance.batches import Padding
from leadframe.conformance.case import Case, naming
from leadframe.conformance.groups import b_attention, b_exact
from leadframe.conformance.groups.b_attention import LAYOUTS, fit, not_claimed
from leadframe.conformance.kit import Kit
from leadframe.platform import KV, CompiledStep, StepArrays

_SLACK = 1 << 16
_MANY_STEPS = 24
_DECODE = Shape(decodes=(33, 1, 70, 5), padding=Padding(decodes=1, blocks=2))


def refit(kit: Kit, problem: Problem, seed: int) -> Problem:
    """Another problem for the same bucket: other lengths, blocks and slots."""
    rng = np.random.default_rng([kit.seed, seed])
    shape, size = problem.shape, problem.shape.block_size
    decodes = tuple(int(n) for n in rng.permutation(shape.decodes))
    chunks = tuple((n, n + int(rng.integers(0, 9))) for n, _ in shape.chunks)
    longest = max([*decodes, *(seq_len for _, seq_len in chunks)])
    spare = problem.batch.bucket.num_blocks - -(-longest // size)
    padding = replace(shape.padding, blocks=spare)
    return make_problem(replace(shape, decodes=decodes, chunks=chunks, padding=padding), rng)


def _rounded(kit: Kit, weights: dict[str, Any]) -> dict[str, Any]:
    """Queries, keys and values as the device holds them."""
    return {name: kit.get(array).astype(np.float64) for name, array in weights.items()}


class Replay:
    """A compiled attention step over a KV pool that is refilled for each problem."""

    def __init__(self, kit: Kit, problem: Problem, blocks: int = 96) -> None:
        self.kit = kit
        self.calls = 0
        self.kv = kit.backend.kv_alloc(problem.kv_spec, blocks)
        self.blocks = blocks
        self.weights, kv, _ = prepare(kit, problem)
        kit.backend.kv_free(kv)
        inner = attention_step(kit, problem)

        def step(weights: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
            self.calls += 1
            return inner(weights, kv_d, arrays)  # type: ignore[no-any-return]

        self.problem = problem
        self.compiled: CompiledStep = kit.compile(
            step, problem.batch, self.weights, self.kv, capture=True
        )

    def run(self, problem: Problem) -> Outcome:
        """Fills the pool, replays with the problem's batch, reads everything back."""
        kit, ids = self.kit, list(range(len(problem.pool)))
        self.kv[0] = kit.backend.kv_write(self.kv[0], ids, problem.pool.astype(np.float32))
        pool = np.asarray(kit.backend.kv_read(self.kv[0], ids)).astype(np.float64)
        rounded = _rounded(kit, self.weights)
        outputs, self.kv = self.compiled.run(problem.batch, self.kv)
        out = kit.get(outputs["out"])
        after = np.asarray(kit.backend.kv_read(self.kv[0], ids)).astype(np.float64)
        exact_out, exact_pool = expected(replace(problem, pool=pool, **rounded))
        return Outcome(out, after, exact_out, exact_pool)

    def close(self) -> None:
        """Frees the step and the pool."""
        self.compiled.close()
        self.kit.backend.kv_free(self.kv)


def _refresh(kit: Kit, shape: Shape) -> None:
    """Replays with changed tables, lengths and slots."""
    problem = make_problem(fit(kit, shape), kit.rng)
    replay = Replay(kit, problem)
    for seed in range(4):
        other = problem if seed == 0 else refit(kit, problem, seed)
        check_outcome(kit, other, replay.run(other))
    replay.close()


def _interleaved(kit: Kit) -> None:
    """Buckets take turns on one pool; neither disturbs the other."""
    shapes = [fit(kit, _DECODE), fit(kit, LAYOUTS["mixed-padded"])]
    problems = [make_problem(shape, kit.rng) for shape in shapes]
    replays = [Replay(kit, problem) for problem in problems]
    for seed in (1, 2, 3):
        for problem, replay in zip(problems, replays, strict=True):
            other = refit(kit, problem, seed)
            check_outcome(kit, other, replay.run(other))
    for replay in replays:
        replay.close()


def _as_many_as_claimed(kit: Kit) -> None:
    """As many compiled steps live at once as `max_graphs` says, and each still does its own."""
    count = min(_MANY_STEPS, kit.backend.caps.max_graphs or _MANY_STEPS)
    shape = fit(kit, Shape(decodes=(33, 5)))
    problems = [
        make_problem(replace(shape, padding=Padding(blocks=i)), kit.rng) for i in range(count)
    ]
    replays = [Replay(kit, problem) for problem in problems]
    for i, (problem, replay) in enumerate(zip(problems, replays, strict=True)):
        with naming(f"step {i} of {count}"):
            check_outcome(kit, problem, replay.run(problem))
    for replay in replays:
        replay.close()


def _compile_is_harmless(kit: Kit) -> None:
    """`compile` writes no block but the null block."""
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng, 5.0)
    weights, kv, exact = prepare(kit, problem)
    step = attention_step(kit, problem)
    compiled = kit.compile(step, problem.batch, weights, kv, capture=True)
    ids = list(range(1, len(problem.pool)))
    pool = np.asarray(kit.backend.kv_read(kv[0], ids)).astype(np.float64)
    kit.same("KV after compile", pool, exact.pool[1:])
    compiled.close()
    kit.backend.kv_free(kv)


def _no_recompile(kit: Kit) -> None:
    """A static backend traces a step while it compiles, and never when it runs.

    Any other calls it at most once a run; a step is pure, so it may also be repeated without.
    """
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    replay = Replay(kit, problem)
    replay.run(problem)
    calls = replay.calls
    for seed in (1, 2, 3, 4):
        replay.run(refit(kit, problem, seed))
    grown = replay.calls - calls
    replay.close()
    kit.metrics["traces"] = calls
    if kit.is_static:
        kit.check(grown == 0, f"the step was traced {grown} more times in 4 runs")
    else:
        kit.check(grown <= 4, f"a step without a graph was called {grown} times in 4 runs")


def _many_replays(kit: Kit, count: int) -> None:
    """Memory does not grow with replays."""
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    replay = Replay(kit, problem)
    for _ in range(3):
        _, replay.kv = replay.compiled.run(problem.batch, replay.kv)
    before = kit.backend.memory().used
    started = time.perf_counter()
    for _ in range(count):
        _, replay.kv = replay.compiled.run(problem.batch, replay.kv)
    kit.metrics["seconds_per_replay"] = (time.perf_counter() - started) / count
    growth = kit.backend.memory().used - before
    replay.close()
    kit.check(growth < _SLACK, f"{count} replays grew memory by {growth:,} bytes")


def _steps_close(kit: Kit) -> None:
    """Closing steps gives their memory back."""
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    Replay(kit, problem).close()
    gc.collect()
    before = kit.backend.memory().used
    for _ in range(10):
        Replay(kit, problem).close()
    gc.collect()  # a step and its weights refer to each other
    growth = kit.backend.memory().used - before
    kit.check(growth < _SLACK, f"10 compiled and closed steps leave {growth:,} bytes")


def _honest_bytes(kit: Kit) -> None:
    """`bytes` is at least half of what a step took."""
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    replay = Replay(kit, problem)
    before = kit.backend.memory().used
    step = attention_step(kit, problem)
    compiled = kit.compile(step, problem.batch, replay.weights, replay.kv, capture=True)
    _, replay.kv = compiled.run(problem.batch, replay.kv)
    delta = kit.backend.memory().used - before
    claimed = compiled.bytes
    kit.metrics.update(claimed_bytes=claimed, measured_bytes=delta)
    fields = (compiled.compile_seconds, compiled.capture_seconds)
    compiled.close()
    replay.close()
    kit.check(all(seconds >= 0 for seconds in fields), f"seconds are {fields}")
    kit.check(claimed >= 0, f"bytes is {claimed}")
    kit.check(
        2 * claimed + _SLACK >= delta,
        f"a step says that it holds {claimed:,} bytes; memory grew by {delta:,}",
    )


def _outputs_survive(kit: Kit) -> None:
    """Outputs hold until the next run: a download in between changes nothing."""
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    replay = Replay(kit, problem)
    ids = list(range(len(problem.pool)))
    replay.kv[0] = kit.backend.kv_write(replay.kv[0], ids, problem.pool.astype(np.float32))
    outputs, replay.kv = replay.compiled.run(problem.batch, replay.kv)
    first = kit.get(outputs["out"]).copy()
    kit.backend.upload(np.ones(1 << 16, np.float32))
    kit.backend.memory()
    second = kit.get(outputs["out"])
    replay.close()
    kit.same("outputs downloaded twice", second, first)


def _batch_is_copied(kit: Kit) -> None:
    """The host may rewrite the batch's buffers as soon as `run` returns."""
    problem = make_problem(fit(kit, _DECODE), kit.rng)
    replay = Replay(kit, problem)
    ids = list(range(len(problem.pool)))
    replay.kv[0] = kit.backend.kv_write(replay.kv[0], ids, problem.pool.astype(np.float32))
    batch = replace(problem.batch, ints=problem.batch.ints.copy())
    outputs, replay.kv = replay.compiled.run(batch, replay.kv)
    batch.ints[:] = 0
    got = kit.get(outputs["out"])
    rounded = _rounded(kit, replay.weights)
    exact, _ = expected(replace(problem, **rounded))
    live = problem.live
    replay.close()
    kit.close_to("attention", got[live], exact[live], problem.shape.dtype)


def _captured(case: Case, shape: Shape, tier: str) -> Case:
    return Case(
        case.id.replace("B.", "D.", 1),
        lambda kit: b_attention.run_shape(kit, fit(kit, shape), np.nan, capture=True),
        tier,  # type: ignore[arg-type]
        lambda kit: not_claimed(kit, fit(kit, shape)),
    )


def _captured_cases() -> list[Case]:
    out = []
    for name, shape in LAYOUTS.items():
        out.append(_captured(Case(f"B.attention[{name}]", lambda kit: None), shape, "core"))
    for heads, kv_heads in b_attention.GROUPINGS:
        shape = replace(b_attention.MIXED, heads=heads, kv_heads=kv_heads)
        case = Case(f"B.attention[gqa-{heads}-{kv_heads}]", lambda kit: None)
        out.append(_captured(case, shape, "full"))
    for window in (1, 16, 17):
        shape = replace(b_attention.MIXED, window=window)
        out.append(
            _captured(Case(f"B.attention[window-{window}]", lambda kit: None), shape, "full")
        )
    return out


def _captured_exact(name: str, choice: str) -> Case:
    shape = b_exact.SHAPES[name]
    return Case(
        f"D.exact[{name}-{choice}]",
        lambda kit: b_exact.run_exact(kit, fit(kit, shape), choice, capture=True),
        "full",
    )


CASES = [
    *_captured_cases(),
    *(_captured_exact(n, c) for n in b_exact.SHAPES for c in ("self", "first", "random")),
    Case("D.replay[decode]", lambda kit: _refresh(kit, _DECODE)),
    Case("D.replay[mixed]", lambda kit: _refresh(kit, LAYOUTS["mixed-padded"])),
    Case("D.replay[interleaved]", _interleaved),
    Case("D.replay[50-times]", lambda kit: _many_replays(kit, 50)),
    Case("D.replay[1000-times]", lambda kit: _many_replays(kit, 1000), "full"),
    Case("D.compile[harmless]", _compile_is_harmless),
    Case("D.compile[no-recompile]", _no_recompile),
    Case("D.compile[max-graphs]", _as_many_as_claimed, "full"),
    Case("D.compile[close]", _steps_close),
    Case("D.compile[bytes]", _honest_bytes),
    Case("D.run[outputs-survive]", _outputs_survive),
    Case("D.run[batch-is-copied]", _batch_is_copied),
]
