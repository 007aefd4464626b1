"""Group H: speed as a share of what this device was measured to do, here, now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.attention_cases import Shape, attention_step, make_problem, prepare
from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import fit
from leadframe.conformance.kit import Kit
from leadframe.platform import KV, KVLayerSpec, KVSpec, StepArrays

_REPEATS = 5
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


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


def memory_bandwidth(kit: Kit) -> float:
    """Bytes per second of moving memory, by the fastest of three ways.

    Each can be slow for a reason of its own: a fresh result for every addition, the backend's
    copy kernel, its matrix times vector. The fastest is nearest to what the device can do.
    """
    return max(_add_bandwidth(kit), _block_bandwidth(kit), _read_bandwidth(kit))


def _read_bandwidth(kit: Kit, rows: int = 8192, columns: int = 4096) -> float:
    """Reading a weight for a single token."""
    weight = np.ones((rows, columns), np.float32)
    seconds = _linear_seconds(kit, np.ones((1, columns), np.float32), weight)
    return rows * columns * _ITEMSIZE.get(kit.dtype, 4) / seconds


def _block_bandwidth(kit: Kit, megabytes: int = 64) -> float:
    shape = fit(kit, Shape())
    spec = KVSpec((KVLayerSpec(4, shape.dim),), shape.block_size, shape.dtype)
    num = megabytes * 1024 * 1024 // kit.backend.kv_block_bytes(spec)
    (layer,) = kit.backend.kv_alloc(spec, 2 * num + 1)
    src = np.arange(1, num + 1, dtype=np.int32)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        layer = kit.ops.kv_copy(layer, src, src + num)
        kit.backend.kv_read(layer, [2 * num])
        best = min(best, time.perf_counter() - started)
    kit.backend.kv_free([layer])
    return 2.0 * num * kit.backend.kv_block_bytes(spec) / best


def _add_bandwidth(kit: Kit, megabytes: int = 64) -> float:
    """By two sizes of the same step, so that what a step costs anyhow does not count."""
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


def matmul_peak(kit: Kit, tokens: int = 1024, size: int = 2048) -> float:
    """Floating-point operations per second of `linear` on many tokens."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, size), np.float32)
    weight = rng.standard_normal((size, size), np.float32)
    return 2.0 * tokens * size * size / _linear_seconds(kit, x, weight)


def _linear_seconds(kit: Kit, x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]) -> float:
    arrays = {
        "x": kit.backend.upload(x, kit.dtype),
        "w": kit.backend.upload(weight, kit.dtype, role="linear"),
    }
    batch, kv = _plain(kit)

    def step(w: Any, kv_d: KV, inputs: StepArrays) -> tuple[dict[str, Any], KV]:
        return {"done": _scalar(kit.ops.linear(w["x"], w["w"]))}, kv_d

    seconds = timed(kit, step, batch, arrays, kv)
    kit.backend.kv_free(kv)
    return seconds


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


def _decode(kit: Kit) -> None:
    """Attention bytes per second at decode, as a share of the memory bandwidth."""
    shape = fit(kit, Shape(heads=16, kv_heads=4, decodes=(1024,) * 32))
    shape = replace(
        shape, dtype=kit.dtype if kit.dtype in kit.backend.caps.kv_dtypes else shape.dtype
    )
    seconds = _attention(kit, shape)
    moved = sum(shape.decodes) * 2 * shape.kv_heads * shape.dim * _ITEMSIZE.get(shape.dtype, 4)
    bandwidth = memory_bandwidth(kit)
    kit.metrics.update(
        seconds=seconds,
        bytes_per_second=moved / seconds,
        memory_bytes_per_second=bandwidth,
        share_of_memory=moved / seconds / bandwidth,
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
        memory_bytes_per_second=memory_bandwidth(kit), matmul_flop_per_second=matmul_peak(kit)
    )


CASES = [
    Case("H.device[rates]", _rates, "perf"),
    Case("H.attention[decode]", _decode, "perf"),
    Case("H.attention[prefill]", _prefill, "perf"),
    Case("H.step[overhead]", _overhead, "perf"),
]
