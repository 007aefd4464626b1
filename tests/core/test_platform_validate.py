"""A backend's problems are all told at once, and its exceptions never reach the core bare."""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.errors import BackendBug, CompileError, ContractViolation, DeviceLost
from leadframe.platform import MEMBERS, Backend, Capabilities, guard, validate_backend
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe.runner.runner import ModelRunner

BATCH = make_batch(BatchSpec((Row(1, 1, (1,)),), 16, 1))


def problems_of(backend):
    with pytest.raises(ContractViolation) as caught:
        validate_backend(backend, "the plugin")
    return caught.value.problems


def test_a_good_backend_passes():
    backend = ReferenceBackend()
    assert validate_backend(backend, "x") is backend


def test_every_problem_is_listed_with_a_hint():
    class Wrong(ReferenceBackend):
        kv_free = property()  # hides the inherited one
        kv_fre = None
        caps = Capabilities(family="", block_sizes=(), graph="records", kv_dtypes=())

        def upload(self, source):
            return source

        @property
        def ops(self):
            ops = dict(super().ops, attention=lambda q, kv: q, linaer=print, embed=3)
            del ops["kv_copy"]
            return {**ops, "kv_copi": print}

    found = "\n".join(problems_of(Wrong()))
    for text in (
        "member 'kv_free' is missing; did you mean 'kv_fre'",
        "member 'upload' is called as (source, dtype=…, partition=…, role=…)",
        "caps.block_sizes",
        "did you mean 'record'",
        "caps.kv_dtypes",
        "caps.family",
        "op 'attention' is called as (q, kv, plan, params)",
        "did you mean 'linear'",
        "op 'embed' is int",
        "required op 'kv_copy' is missing; did you mean 'kv_copi'",
    ):
        assert text in found, text


def test_a_newer_plugin_may_have_ops_that_this_core_does_not_know():
    class Newer(ReferenceBackend):
        @property
        def ops(self):
            return dict(super().ops, warp=print)

    assert any("warp" in problem for problem in problems_of(Newer()))
    validate_backend(Newer(), "x", contract=(1, 1))


@pytest.mark.parametrize("answer", [lambda spec: 1 / 0, lambda spec: False])
def test_why_not_must_answer(answer):
    class Odd(ReferenceBackend):
        caps = Capabilities(family="numpy", why_not=answer)

    assert any("why_not" in problem for problem in problems_of(Odd()))


class _Raises(ReferenceBackend):
    def memory(self):
        raise RuntimeError("driver")

    def kv_alloc(self, spec, num_blocks):
        raise DeviceLost("gone")

    @property
    def ops(self):
        return dict(super().ops, softcap=_bad_softcap)


def _bad_softcap(x, cap):
    return x["nothing"]


def test_foreign_exceptions_are_the_backends_bug():
    backend = guard(_Raises())
    assert isinstance(backend, Backend)
    with pytest.raises(BackendBug, match="'memory' raised RuntimeError: driver") as caught:
        backend.memory()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(DeviceLost):
        backend.kv_alloc(None, 1)


def test_an_exception_inside_a_step_names_the_op():
    backend = guard(_Raises())

    def step(weights, kv, arrays):
        return {"x": backend.ops["softcap"](np.ones(3), 2.0)}, kv

    with pytest.raises(BackendBug) as caught:
        backend.compile(step, BATCH.bucket, {}, []).run(BATCH, [])
    assert caught.value.member == "softcap"


def test_what_compile_returns_is_checked():
    class Odd(ReferenceBackend):
        def compile(self, step, bucket, weights, kv, capture=True):
            return step

    with pytest.raises(ContractViolation, match="it has no 'run'"):
        guard(Odd()).compile(len, BATCH.bucket, {}, [])


class Compiling:
    """A step that notes when someone waits for it."""

    capture_seconds, cache_hit = 0.0, None

    def __init__(self, events):
        self.events = events

    @property
    def bytes(self):
        self.events.append("asked")
        return 1

    @property
    def compile_seconds(self):
        raise CompileError(BATCH.bucket, "found out behind the call")

    def run(self, batch, kv_d): ...

    def close(self): ...


class CompilesBehindTheCall(ReferenceBackend):
    def __init__(self):
        super().__init__()
        self.events = []

    def compile(self, step, bucket, weights, kv, capture=True):
        self.events.append("compile")
        return Compiling(self.events)


def test_a_step_that_is_still_compiling_is_not_waited_for():
    backend = CompilesBehindTheCall()
    step = guard(backend).compile(len, BATCH.bucket, {}, [])
    assert backend.events == ["compile"]
    with pytest.raises(CompileError, match="behind the call"):
        step.compile_seconds  # noqa: B018


def test_every_step_of_a_start_is_begun_before_one_is_waited_for():
    backend = CompilesBehindTheCall()
    runner = ModelRunner(guard(backend), None, {}, None)
    buckets = [replace(BATCH.bucket, num_blocks=width) for width in (1, 2, 3)]
    policy = SimpleNamespace(all_buckets=lambda: buckets, common_buckets=list)
    runner.configure(policy, None)
    asked = []
    assert runner.prepare(lambda bucket, step: asked.append((bucket, step.bytes))) == 3
    assert backend.events[:3] == ["compile"] * 3
    assert asked == [(bucket, 1) for bucket in buckets]


def test_the_guard_costs_a_step_next_to_nothing():
    plain, guarded = ReferenceBackend(), guard(ReferenceBackend())

    def step(weights, kv, arrays):
        return {}, kv

    def seconds(backend):
        compiled = backend.compile(step, BATCH.bucket, {}, [])
        best = 1.0
        for _ in range(5):
            started = time.process_time()
            for _ in range(2000):
                compiled.run(BATCH, [])
            best = min(best, (time.process_time() - started) / 2000)
        return best

    assert seconds(guarded) - seconds(plain) < 3e-6


def test_the_guard_has_every_member():
    assert all(hasattr(guard(ReferenceBackend()), member) for member in MEMBERS)
