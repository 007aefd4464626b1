"""Group E: whole models. What a request gets does not depend on how it is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.batches import Padding
from leadframe.conformance.case import Case, ConformanceFailure
from leadframe.conformance.kit import Kit
from leadframe.conformance.tiny_model import Driver, Stream, TinyModel, oracle_logits

_COUNT = 12
_LOGIT_STEPS = 60.0  # a whole model accumulates more roundings than one op


def tiny(kit: Kit, window: int | None = None) -> TinyModel:
    """A model whose head dim the backend takes."""
    dims = kit.backend.caps.head_dims
    dim = 64 if dims is None else min(dims, key=lambda have: abs(have - 64))
    return TinyModel(dim=dim, window=window)


def prompts(kit: Kit, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(kit.seed)
    return [[int(t) for t in rng.integers(0, 160, n)] for n in lengths]


def _limit(kit: Kit, dtype: str, scale: float) -> float:
    return _LOGIT_STEPS / 12.0 * kit.tolerance("logits", dtype) * scale


def _teacher_forced(kit: Kit, capture: bool, window: int | None = None) -> None:
    """Logits after every step of a chunked run against the float64 oracle on the same tokens."""
    driver = Driver(kit, tiny(kit, window), capture=capture)
    (prompt,) = prompts(kit, [45])
    stream = driver.generate(prompt, _COUNT, chunk=16)
    exact = oracle_logits(kit, driver, stream.tokens[:-1])[len(prompt) - 1 :]
    got = np.stack(stream.logits)
    driver.close()
    check_logits(kit, driver.dtype, got, exact, stream.tokens[len(prompt) :])


def check_logits(
    kit: Kit,
    dtype: str,
    got: npt.NDArray[Any],
    exact: npt.NDArray[np.float64],
    tokens: Sequence[int],
) -> None:
    """Logits [n, V] are the oracle's within the tolerance, and so is each greedy token.

    A token may be another one where two logits are nearer than the tolerance.
    """
    scale = float(np.abs(exact).max())
    error = float(np.abs(got - exact).max())
    kit.metrics.update(error=error / scale)
    limit = _limit(kit, dtype, scale)
    kit.check(error <= limit, f"logits are off by {error:.3g}, limit {limit:.3g}")
    for row, token in zip(exact, tokens, strict=True):
        gap = float(row.max() - row[token])
        kit.check(gap <= 2 * limit, f"greedy token {token} is {gap:.3g} below the best logit")


def _agree(kit: Kit, what: str, got: Stream, want: Stream, dtype: str) -> None:
    """Same tokens and nearly the same logits, up to the first near-tie."""
    for i, (one, other) in enumerate(zip(got.logits, want.logits, strict=True)):
        limit = _limit(kit, dtype, float(np.abs(other).max()))
        error = float(np.abs(one - other).max())
        kit.check(error <= limit, f"{what}: logits of token {i} are off by {error:.3g}")
        best = np.sort(other)[-2:]
        if int(np.argmax(one)) != int(np.argmax(other)):
            is_tie = best[1] - best[0] <= 2 * limit
            kit.check(bool(is_tie), f"{what}: token {i} differs and is no near-tie")
            return


def _compare(kit: Kit, what: str, run: Callable[[Driver, list[list[int]]], list[Stream]]) -> None:
    """Runs prompts alone and as `run` schedules them, and asks for the same."""
    given = prompts(kit, [37, 5, 20, 16])
    driver = Driver(kit, tiny(kit))
    alone = []
    for prompt in given:
        stream = driver.generate(prompt, _COUNT)
        driver.release(stream)
        alone.append(stream)
    driver.close()
    driver = Driver(kit, tiny(kit))
    together = run(driver, given)
    driver.close()
    for i, (got, want) in enumerate(zip(together, alone, strict=True)):
        _agree(kit, f"{what}, prompt {i}", got, want, driver.dtype)


def _finish(driver: Driver, streams: list[Stream], lengths: Sequence[int]) -> None:
    """Decodes every stream to its full length, together."""
    while True:
        running = [s for s, n in zip(streams, lengths, strict=True) if len(s.tokens) < n + _COUNT]
        if not running:
            return
        driver.step([(stream, 1) for stream in running], Padding(decodes=4 - len(running)))


def _chunked(chunk: int) -> Callable[[Driver, list[list[int]]], list[Stream]]:
    def run(driver: Driver, given: list[list[int]]) -> list[Stream]:
        out = []
        for prompt in given:
            stream = driver.generate(prompt, _COUNT, chunk)
            driver.release(stream)
            out.append(stream)
        return out

    return run


def _batched(driver: Driver, given: list[list[int]]) -> list[Stream]:
    """All prompts in one step, then decodes together, padded."""
    streams = [Stream(list(prompt)) for prompt in given]
    driver.step([(s, len(s.tokens)) for s in streams], Padding(rows=1, tokens=7, blocks=1))
    _finish(driver, streams, [len(p) for p in given])
    return streams


def _mixed(driver: Driver, given: list[list[int]]) -> list[Stream]:
    """Prompts join while others decode."""
    streams = [Stream(list(prompt)) for prompt in given]
    driver.step([(streams[0], len(given[0]))])
    for new in (1, 2, 3):
        work = [(s, 1) for s in streams[:new]] + [(streams[new], len(given[new]))]
        driver.step(work)
    _finish(driver, streams, [len(p) for p in given])
    return streams


def _preempted(driver: Driver, given: list[list[int]]) -> list[Stream]:
    """Every stream loses all its blocks twice and is recomputed on others."""
    streams = []
    for prompt in given:
        stream = Stream(list(prompt))
        for stop in (4, 9, _COUNT):
            while len(stream.tokens) < len(prompt) + stop:
                driver.step([(stream, len(stream.tokens) - stream.computed)])
            driver.release(stream)
            driver.free.insert(0, driver.free.pop())
        streams.append(stream)
    return streams


def _prefix_hits(kit: Kit) -> None:
    """A request that reuses another's full blocks gets what it gets alone."""
    driver = Driver(kit, tiny(kit))
    (prefix, tail_a, tail_b) = prompts(kit, [2 * driver.block_size + 3, 9, 14])
    full = len(prefix) // driver.block_size * driver.block_size
    first = driver.generate(prefix + tail_a, 4)
    want = driver.generate(prefix + tail_b, _COUNT)
    hit = Stream(prefix + tail_b, first.blocks[: full // driver.block_size], full)
    driver.step([(hit, len(hit.tokens) - full)])
    while len(hit.logits) < _COUNT:
        driver.step([(hit, 1)])
    driver.close()
    _agree(kit, "prefix hit", hit, want, driver.dtype)


def _capture_agrees(kit: Kit) -> None:
    """Captured steps give what uncaptured steps give."""
    (prompt,) = prompts(kit, [21])
    streams = []
    for capture in (False, True):
        driver = Driver(kit, tiny(kit), capture=capture)
        streams.append(driver.generate(prompt, _COUNT, chunk=8))
        driver.close()
    _agree(kit, "captured", streams[1], streams[0], driver.dtype)


def _no_hook_in_a_step(kit: Kit) -> None:
    """No plugin hook runs while a step does."""
    plugin = kit.plugin
    if plugin is None:
        raise ConformanceFailure("there is no plugin")
    driver = Driver(kit, tiny(kit))
    calls: list[str] = []
    undo = plugin.manager.add_hookcall_monitoring(
        lambda name, impls, kwargs: calls.append(name), lambda *args: None
    )
    try:
        driver.generate([1, 2, 3], 3)
    finally:
        undo()
    driver.close()
    kit.check(not calls, f"hooks ran inside a step: {calls[:3]}")


def _no_plugin(kit: Kit) -> str | None:
    return "this backend was not loaded from a plugin" if kit.plugin is None else None


def _windowed(kit: Kit) -> str | None:
    known = "window" in kit.backend.caps.attention_features
    return None if known else "attention feature 'window' is not claimed"


CASES = [
    Case("E.logits[eager]", lambda kit: _teacher_forced(kit, capture=False)),
    Case("E.logits[captured]", lambda kit: _teacher_forced(kit, capture=True)),
    Case("E.logits[window]", lambda kit: _teacher_forced(kit, False, 18), "full", _windowed),
    Case("E.schedule[chunk-1]", lambda kit: _compare(kit, "chunk 1", _chunked(1)), "full"),
    Case("E.schedule[chunk-7]", lambda kit: _compare(kit, "chunk 7", _chunked(7))),
    Case("E.schedule[chunk-16]", lambda kit: _compare(kit, "chunk 16", _chunked(16)), "full"),
    Case("E.schedule[batched]", lambda kit: _compare(kit, "batched", _batched)),
    Case("E.schedule[mixed]", lambda kit: _compare(kit, "mixed", _mixed)),
    Case("E.schedule[preempted]", lambda kit: _compare(kit, "preempted", _preempted)),
    Case("E.schedule[prefix-hit]", _prefix_hits),
    Case("E.schedule[captured]", _capture_agrees),
    Case("E.step[no-hook]", _no_hook_in_a_step, "core", _no_plugin),
]
