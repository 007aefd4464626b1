"""Group H: speed as a share of what this device was measured to do, here, now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from leadframe.conformance.attention_cases import Shape, attention_step, make_problem, prepare
from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import fit
from leadframe.conformance.kit import Kit
from leadframe.platform import KV, KVLayerSpec, KVSpec, StepArrays

_REPEATS = 5


def timed(kit: Kit, step: Any, batch: Any, weights: Any, kv: KV, inner: int = 1) -> float:
    """Seconds of the fastest run, waiting for the result; the step holds `inner` repetitions."""
    compiled = kit.compile(step, batch, weights, kv, capture=True)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        outputs, kv = compiled.run(batch, kv)
        kit.get(outputs["done"])
        best = min(best, time.perf_counter() - started)
    compiled.close()
    return best / inner


def _plain(kit: Kit) -> tuple[Any, KV]:
    caps = kit.backend.caps
    dim = caps.head_dims[0] if caps.head_dims else 64
    spec = KVSpec((KVLayerSpec(1, dim),), caps.block_sizes[0], caps.kv_dtypes[0])
    rows = (Row(1, 1, (1,)),)
    return make_batch(BatchSpec(rows, caps.block_sizes[0], 1)), kit.backend.kv_alloc(spec, 2)


def _scalar(x: Any) -> Any:
    return x[:1, :1]


def copy_bandwidth(kit: Kit, megabytes: int = 32) -> float:
    """Bytes per second of reading and writing a large array, by two sizes of the same step."""
    rows = megabytes * 1024 * 1024 // (1024 * 4)
    array = kit.backend.upload(np.ones((rows, 1024), np.float32))
    batch, kv = _plain(kit)

    def step(count: int) -> Callable[..., Any]:
        def run(w: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
            x = w["x"]
            for _ in range(count):
                x = x + 1.0
            return {"done": _scalar(x)}, kv_d

        return run

    few = timed(kit, step(1), batch, {"x": array}, kv)
    many = timed(kit, step(4), batch, {"x": array}, kv)
    kit.backend.kv_free(kv)
    # a compiler may fuse the additions; then one pass is all there is to time
    per_pass = max((many - few) / 3, few / 8)
    return 2 * rows * 1024 * 4 / per_pass


def matmul_peak(kit: Kit, size: int = 1024) -> float:
    """Floating-point operations per second of a square `linear`."""
    host = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    arrays = {
        "x": kit.backend.upload(host, kit.dtype),
        "w": kit.backend.upload(host, kit.dtype, role="linear"),
    }
    batch, kv = _plain(kit)

    def step(w: Any, kv_d: KV, inputs: StepArrays) -> tuple[dict[str, Any], KV]:
        return {"done": _scalar(kit.ops.linear(w["x"], w["w"]))}, kv_d

    seconds = timed(kit, step, batch, arrays, kv)
    kit.backend.kv_free(kv)
    return 2.0 * size**3 / seconds


def step_overhead(kit: Kit) -> float:
    """Seconds of a step that does next to nothing."""
    batch, kv = _plain(kit)
    array = kit.backend.upload(np.ones((1, 1), np.float32))

    def step(w: Any, kv_d: KV, inputs: StepArrays) -> tuple[dict[str, Any], KV]:
        return {"done": w["x"] + 1.0}, kv_d

    seconds = timed(kit, step, batch, {"x": array}, kv)
    kit.backend.kv_free(kv)
    return seconds


def _attention(kit: Kit, shape: Shape) -> float:
    problem = make_problem(fit(kit, shape), np.random.default_rng(0), 0.0)
    weights, kv, _ = prepare(kit, problem)
    inner = attention_step(kit, problem)

    def step(w: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
        outputs, kv_out = inner(w, kv_d, arrays)
        return {"done": outputs["out"][:1, :1, :1]}, kv_out

    seconds = timed(kit, step, problem.batch, weights, kv)
    kit.backend.kv_free(kv)
    return seconds


_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def _decode(kit: Kit) -> None:
    """Attention bytes per second at decode, as a share of the copy bandwidth."""
    shape = fit(kit, Shape(heads=16, kv_heads=4, decodes=(512,) * 16))
    shape = replace(
        shape, dtype=kit.dtype if kit.dtype in kit.backend.caps.kv_dtypes else shape.dtype
    )
    seconds = _attention(kit, shape)
    moved = sum(shape.decodes) * 2 * shape.kv_heads * shape.dim * _ITEMSIZE.get(shape.dtype, 4)
    bandwidth = copy_bandwidth(kit)
    kit.metrics.update(
        seconds=seconds,
        bytes_per_second=moved / seconds,
        copy_bytes_per_second=bandwidth,
        share_of_copy=moved / seconds / bandwidth,
        intensity=shape.heads / shape.kv_heads,
    )


def _prefill(kit: Kit) -> None:
    """Attention FLOP per second at prefill, as a share of the matmul peak."""
    length = 512
    shape = fit(kit, Shape(heads=8, kv_heads=4, chunks=((length, length),)))
    seconds = _attention(kit, shape)
    flops = 4.0 * shape.heads * shape.dim * length * (length + 1) / 2
    peak = matmul_peak(kit)
    kit.metrics.update(
        seconds=seconds,
        flop_per_second=flops / seconds,
        matmul_flop_per_second=peak,
        share_of_matmul=flops / seconds / peak,
    )


def _overhead(kit: Kit) -> None:
    kit.metrics["seconds"] = step_overhead(kit)


def _rates(kit: Kit) -> None:
    kit.metrics.update(
        copy_bytes_per_second=copy_bandwidth(kit), matmul_flop_per_second=matmul_peak(kit)
    )


CASES = [
    Case("H.device[rates]", _rates, "perf"),
    Case("H.attention[decode]", _decode, "perf"),
    Case("H.attention[prefill]", _prefill, "perf"),
    Case("H.step[overhead]", _overhead, "perf"),
]
