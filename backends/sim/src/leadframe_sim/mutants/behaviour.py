"""Groups A, E, F, G and I: state, noise, failures and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from leadframe.platform import (
    KV,
    Backend,
    Bucket,
    Capabilities,
    StepBatch,
    StepFunction,
)
from leadframe.platform.reference.backend import ReferenceBackend, ReferenceStep
from leadframe_sim.mutants.base import Mutant, Op, OpMutant


def _noise(op: Op) -> Op:
    """A sum whose order changes from run to run."""
    rng = np.random.default_rng()

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        out = op(q, kv, plan, params)
        return out * (1 + 1e-7 * rng.standard_normal(out.shape)).astype(out.dtype)

    return attention


def _linear_noise(op: Op) -> Op:
    rng = np.random.default_rng()

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        out = op(x, weight, bias)
        return out * (1 + 1e-7 * rng.standard_normal(out.shape)).astype(out.dtype)

    return linear


def _batch_dependent(op: Op) -> Op:
    """Splits the work by the size of the batch."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        out = op(q, kv, plan, params)
        return out * np.float32(1 + 2.0**-23) if plan.bucket.num_seqs > 2 else out

    return attention


def _cached_rope(op: Op) -> Op:
    """Caches the table by the number of tokens."""
    cache: dict[int, Any] = {}

    def rope_table(positions: Any, inv_freq: Any, scaling: float = 1.0) -> Any:
        return cache.setdefault(len(positions), op(positions, inv_freq, scaling))

    return rope_table


def _own_chunk_only(op: Op) -> Op:
    """A chunk sees the tokens of its own step and forgets what came before."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        first = plan.bucket.num_decodes
        counts = np.diff(plan.query_start)[first:]
        if first == plan.bucket.num_seqs or params.window is not None:
            return op(q, kv, plan, params)
        return op(q, kv, plan, replace(params, window=max(1, int(counts.max()))))

    return attention


def _forgets_after_many(op: Op) -> Op:
    """Loses a write now and then: a race, made slow enough to see."""
    calls = [0]

    def kv_append(kv_d: Any, k: Any, v: Any, plan: Any) -> Any:
        calls[0] += 1
        if calls[0] % 17 == 0:
            plan = replace(plan, slots=np.zeros_like(plan.slots))
        return op(kv_d, k, v, plan)

    return kv_append


class _SwallowingStep(ReferenceStep):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Any], KV]:
        try:
            return super().run(batch, kv_d)
        except Exception:
            return {}, kv_d


class _Swallows(ReferenceBackend):
    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> Any:
        return _SwallowingStep(step, bucket, weights)


class _ClearingStep(ReferenceStep):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Any], KV]:
        try:
            return super().run(batch, kv_d)
        except Exception:
            for layer in kv_d:
                layer[:] = 0
            raise


class _ClearsOnFailure(ReferenceBackend):
    def compile(self, step: Any, bucket: Any, weights: Any, kv: Any, capture: bool = True) -> Any:
        return _ClearingStep(step, bucket, weights)


class _StickyFailure(ReferenceBackend):
    """After one failed step, no step works."""

    failed = False

    def compile(self, step: Any, bucket: Any, weights: Any, kv: Any, capture: bool = True) -> Any:
        def guarded(*args: Any) -> Any:
            if self.failed:
                raise RuntimeError("the stream is in an error state")
            try:
                return step(*args)
            except Exception:
                self.failed = True
                raise

        return ReferenceStep(guarded, bucket, weights)


class _ClosesOnce(ReferenceBackend):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


class _Global(ReferenceBackend):
    """Keeps its arrays in a place that all instances share."""

    instances: list[_Global] = []  # noqa: RUF012 - the fault

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[Any] = []
        self.instances.append(self)

    def upload(self, *args: Any, **kwargs: Any) -> Any:
        array = super().upload(*args, **kwargs)
        self.arrays.append(array)
        return array

    def close(self) -> None:
        for instance in self.instances:
            for array in instance.arrays:
                array[...] = 0
        self.instances.clear()


class _SetsErrorState(ReferenceBackend):
    def compile(self, step: Any, bucket: Any, weights: Any, kv: Any, capture: bool = True) -> Any:
        np.seterr(all="ignore", divide="raise")
        return super().compile(step, bucket, weights, kv, capture)


class _NewCaps(ReferenceBackend):
    @property
    def caps(self) -> Capabilities:
        return replace(super().caps)


def _claims(**caps: Any) -> Any:
    return lambda: OpMutant({}, **caps)


def _op(name: str, wrap: Any, **caps: Any) -> Any:
    return lambda: OpMutant({name: wrap}, **caps)


def _own(kind: type[Backend]) -> Any:
    return kind


def _refuses_own(spec: Any) -> str | None:
    return "I would rather not"


MUTANTS = [
    Mutant("shared-instances", "A", "closing one backend clears the others", _own(_Global)),
    Mutant("sets-error-state", "A", "changes NumPy's error state", _own(_SetsErrorState)),
    Mutant("cached-rope", "E", "caches rope tables by shape", _op("rope_table", _cached_rope)),
    Mutant(
        "own-chunk-only", "E", "a chunk forgets what came before", _op("attention", _own_chunk_only)
    ),
    Mutant(
        "loses-writes",
        "E",
        "loses the K/V of every 17th append",
        _op("kv_append", _forgets_after_many),
    ),
    Mutant("noise", "F", "attention differs by 1e-7 from run to run", _op("attention", _noise)),
    Mutant(
        "linear-noise", "F", "linear differs by 1e-7 from run to run", _op("linear", _linear_noise)
    ),
    Mutant(
        "batch-dependent",
        "F",
        "claims batch invariance; one ulp depends on the batch",
        _op("attention", _batch_dependent, batch_invariant=True),
    ),
    Mutant("swallows-exceptions", "G", "a step that raises returns nothing", _own(_Swallows)),
    Mutant("clears-on-failure", "G", "a failed step clears the KV", _own(_ClearsOnFailure)),
    Mutant("sticky-failure", "G", "after a failed step no step works", _own(_StickyFailure)),
    Mutant("closes-once", "G", "close raises the second time", _own(_ClosesOnce)),
    Mutant(
        "accepts-everything",
        "I",
        "why_not has no objection, ever",
        _claims(why_not=lambda spec: None),
    ),
    Mutant(
        "refuses-its-own",
        "I",
        "why_not refuses what the capabilities claim",
        _claims(why_not=_refuses_own),
    ),
    Mutant(
        "empty-reason",
        "I",
        "why_not gives an empty reason",
        _claims(why_not=lambda spec: "" if spec.features else None),
    ),
    Mutant(
        "claims-the-future",
        "I",
        "claims a feature that no contract has",
        _claims(attention_features=frozenset({"window", "softcap", "sinks"})),
    ),
    Mutant(
        "claims-window-not",
        "I",
        "has windows in why_not but not in the capabilities",
        _claims(attention_features=frozenset({"softcap"})),
    ),
    Mutant("new-caps", "I", "caps is another object every time", _own(_NewCaps)),
]
