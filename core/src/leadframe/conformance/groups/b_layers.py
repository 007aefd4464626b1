"""Group B: layer ops against the float64 oracle, through the op table that a model gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.conformance.case import Case
from leadframe.conformance.kit import ORACLE, Kit
from leadframe.platform import KVLayerSpec, KVSpec, OpSpec

Arrays = Mapping[str, Any]
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_TOKENS = 5
_MANY, _WIDE = 300, 5000


def in_step(kit: Kit, function: Callable[[Any, Arrays], Any], arrays: Arrays) -> Any:
    """Runs `function(ops, arrays)` inside a compiled step and downloads what it returns."""
    caps = kit.backend.caps
    size = caps.block_sizes[0]
    dim = caps.head_dims[0] if caps.head_dims else 64
    kv = kit.backend.kv_alloc(KVSpec((KVLayerSpec(1, dim),), size, caps.kv_dtypes[0]), 2)
    batch = make_batch(BatchSpec((Row(_TOKENS, _TOKENS, (1,) * -(-_TOKENS // size)),), size, 0))

    def step(weights: Any, kv_d: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
        result = function(kit.ops, weights)
        parts = result if isinstance(result, tuple) else (result,)
        return {str(i): part for i, part in enumerate(parts) if part is not None}, kv_d

    outputs, kv = kit.run(step, batch, arrays, kv)
    kit.backend.kv_free(kv)
    return tuple(outputs[key] for key in sorted(outputs, key=int))


def compare(
    kit: Kit,
    op: str,
    dtype: str,
    floats: Mapping[str, Any],
    ints: Mapping[str, Any],
    call: Callable[[Callable[..., Any], Arrays], Any],
) -> None:
    """Runs one op on the backend and on the oracle and compares every result."""
    device, exact = {}, {}
    for name, host in floats.items():
        device[name], exact[name] = kit.put(host.astype(np.float32), dtype)
    for name, host in ints.items():
        device[name], exact[name] = kit.backend.upload(host), host
    got = in_step(kit, lambda ops, arrays: call(getattr(ops, op), arrays), device)
    want = call(ORACLE[op], exact)
    want = want if isinstance(want, tuple) else (want,)
    for one, other in zip(got, want, strict=True):
        kit.close_to(op, one, other, dtype)


def _linear(
    kit: Kit,
    dtype: str,
    rng: np.random.Generator,
    bias: bool,
    sizes: tuple[int, int, int] = (_TOKENS, 96, 40),
) -> None:
    rows, inputs, outputs = sizes
    floats = {
        "x": rng.standard_normal((rows, inputs)),
        "w": rng.standard_normal((outputs, inputs)) / 10,
        "b": rng.standard_normal(outputs),
    }
    last = (lambda a: a["b"]) if bias else (lambda a: None)
    compare(kit, "linear", dtype, floats, {}, lambda op, a: op(a["x"], a["w"], last(a)))


def _linear_role(
    kit: Kit,
    dtype: str,
    rng: np.random.Generator,
    sizes: tuple[int, int, int] = (_TOKENS, 96, 40),
) -> None:
    """A weight uploaded with role "linear" may be packed, and `linear` reads it all the same."""
    rows, inputs, outputs = sizes
    x, exact_x = kit.put(rng.standard_normal((rows, inputs)).astype(np.float32), dtype)
    host = (rng.standard_normal((outputs, inputs)) / 10).astype(np.float32)
    _, exact_w = kit.put(host, dtype)
    packed = kit.backend.upload(host, dtype, role="linear")
    (got,) = in_step(kit, lambda ops, a: ops.linear(a["x"], a["w"]), {"x": x, "w": packed})
    kit.close_to("linear", got, ORACLE["linear"](exact_x, exact_w), dtype)


def _norm(kit: Kit, dtype: str, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    floats = {"x": rng.standard_normal(shape) * 3, "w": rng.standard_normal(shape[-1])}
    for offset in (0.0, 1.0):
        call = _norm_call(offset)
        compare(kit, "rms_norm", dtype, floats, {}, call)


def _norm_call(offset: float) -> Callable[[Callable[..., Any], Arrays], Any]:
    return lambda op, a: op(a["x"], a["w"], 1e-5, offset)


def _add_norm(
    kit: Kit, dtype: str, rng: np.random.Generator, shape: tuple[int, int] = (_TOKENS, 64)
) -> None:
    """The sum is rounded to the dtype before it is normed, as two ops would do."""
    floats = {name: rng.standard_normal(shape) for name in ("x", "r")}
    x, exact_x = kit.put(floats["x"].astype(np.float32), dtype)
    r, exact_r = kit.put(floats["r"].astype(np.float32), dtype)
    w, exact_w = kit.put(rng.standard_normal(shape[1]).astype(np.float32), dtype)
    norm, total = in_step(
        kit, lambda ops, a: ops.add_rms_norm(a["x"], a["r"], a["w"], 1e-5), {"x": x, "r": r, "w": w}
    )
    kit.close_to("add_rms_norm", total, exact_x + exact_r, dtype)
    want = ORACLE["rms_norm"](total.astype(np.float64), exact_w, 1e-5)
    kit.close_to("add_rms_norm", norm, want, dtype)


def _rope(kit: Kit, dtype: str, rng: np.random.Generator, dim: int, rotated: int) -> None:
    positions = rng.integers(0, 4000, _TOKENS).astype(np.int32)
    positions[0] = 0
    inv_freq = (10000.0 ** -(np.arange(rotated // 2) / (rotated // 2))).astype(np.float32)
    x, exact = kit.put(rng.standard_normal((_TOKENS, 3, dim)).astype(np.float32), dtype)
    arrays = {"x": x, "p": kit.backend.upload(positions), "f": kit.backend.upload(inv_freq)}
    (got,) = in_step(
        kit, lambda ops, a: ops.rope(a["x"], ops.rope_table(a["p"], a["f"], 1.25)), arrays
    )
    table = ORACLE["rope_table"](positions, inv_freq, 1.25)
    want = ORACLE["rope"](exact, table)
    # an angle of thousands has few bits left in float32: the table's own error dominates
    slack = 4000 * 2.0**-24 * np.abs(exact).max()
    error = np.abs(got.astype(np.float64) - want).max()
    limit = kit.tolerance("rope", dtype) * np.abs(want).max() + slack
    kit.check(bool(error <= limit), f"rope in {dtype}: error {error:.2e}, limit {limit:.2e}")
    kit.same("dimensions beyond the rotated ones", got[..., rotated:], exact[..., rotated:])


def _gate(
    kit: Kit,
    dtype: str,
    rng: np.random.Generator,
    op: str,
    shape: tuple[int, int] = (_TOKENS, 64),
) -> None:
    gate = np.concatenate([rng.standard_normal(shape[1] - 4) * 3, [-200.0, 200.0, 0.0, -20.0]])
    floats = {"g": np.tile(gate, (shape[0], 1)), "u": rng.standard_normal(shape)}
    compare(kit, op, dtype, floats, {}, lambda fn, a: fn(a["g"], a["u"]))


def _softcap(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    floats = {"x": rng.standard_normal((_TOKENS, 64)) * 40}
    compare(kit, "softcap", dtype, floats, {}, lambda op, a: op(a["x"], 30.0))


def _embed(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    table, exact = kit.put(rng.standard_normal((50, 64)).astype(np.float32), dtype)
    ids = np.array([49, 0, 7, -1, 2**30], np.int32)
    arrays = {"t": table, "i": kit.backend.upload(ids)}
    (got,) = in_step(kit, lambda ops, a: ops.embed(a["t"], a["i"]), arrays)
    kit.same("rows of the embedding", got[:3].astype(np.float64), exact[[49, 0, 7]])
    is_row = [(got[i].astype(np.float64) == exact).all(-1).any() for i in (3, 4)]
    kit.check(all(is_row), "ids outside the vocabulary must be clamped to some row")


def _embed_role(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    host = rng.standard_normal((50, 64)).astype(np.float32)
    _, exact = kit.put(host, dtype)
    table = kit.backend.upload(host, dtype, role="embed")
    ids = np.array([1, 48, 3, 3, 0], np.int32)
    arrays = {"t": table, "i": kit.backend.upload(ids)}
    (got,) = in_step(kit, lambda ops, a: ops.embed(a["t"], a["i"]), arrays)
    kit.same("rows of the embedding", got.astype(np.float64), exact[ids])


def _wide_rows(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    """Long rows of a table and of activations, and more of them than a block of a kernel takes."""
    table, exact = kit.put(rng.standard_normal((40, _WIDE)).astype(np.float32), dtype)
    ids = rng.integers(0, 40, _MANY).astype(np.int32)
    arrays = {"t": table, "i": kit.backend.upload(ids)}
    both = in_step(
        kit, lambda ops, a: (ops.embed(a["t"], a["i"]), ops.take_rows(a["t"], a["i"])), arrays
    )
    for op, got in zip(("embed", "take_rows"), both, strict=True):
        kit.same(op, got.astype(np.float64), exact[ids])


def _take_rows(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    x, exact = kit.put(rng.standard_normal((9, 64)).astype(np.float32), dtype)
    rows = np.array([8, 8, 0, 3, 5], np.int32)
    arrays = {"x": x, "r": kit.backend.upload(rows)}
    (got,) = in_step(kit, lambda ops, a: ops.take_rows(a["x"], a["r"]), arrays)
    kit.same("taken rows", got.astype(np.float64), exact[rows])


def _collectives(kit: Kit, dtype: str, rng: np.random.Generator) -> None:
    """For one rank they are the identity."""
    x, exact = kit.put(rng.standard_normal((_TOKENS, 64)).astype(np.float32), dtype)
    both = in_step(kit, lambda ops, a: (ops.all_reduce(a["x"]), ops.all_gather(a["x"])), {"x": x})
    for name, got in zip(("all_reduce", "all_gather"), both, strict=True):
        kit.same(name, got.astype(np.float64), exact)


_Check = Callable[[Kit, str, np.random.Generator], None]

CHECKS: dict[str, _Check] = {
    "linear": lambda kit, dtype, rng: _linear(kit, dtype, rng, bias=False),
    "linear-bias": lambda kit, dtype, rng: _linear(kit, dtype, rng, bias=True),
    "linear-packed": _linear_role,
    "rms_norm": lambda kit, dtype, rng: _norm(kit, dtype, rng, (_TOKENS, 64)),
    "rms_norm-heads": lambda kit, dtype, rng: _norm(kit, dtype, rng, (_TOKENS, 3, 64)),
    "add_rms_norm": _add_norm,
    "rope": lambda kit, dtype, rng: _rope(kit, dtype, rng, 64, 64),
    "rope-partial": lambda kit, dtype, rng: _rope(kit, dtype, rng, 64, 32),
    "silu_mul": lambda kit, dtype, rng: _gate(kit, dtype, rng, "silu_mul"),
    "gelu_mul": lambda kit, dtype, rng: _gate(kit, dtype, rng, "gelu_mul"),
    "softcap": _softcap,
    "embed": _embed,
    "embed-role": _embed_role,
    "take_rows": _take_rows,
    "collectives": _collectives,
}


def _of_size(check: Callable[..., None], *sizes: Any) -> _Check:
    return lambda kit, dtype, rng: check(kit, dtype, rng, *sizes)


_PRODUCTS = {
    "one-row": (1, 1032, 264),
    "two-rows": (2, 264, 1032),
    "many-rows": (_MANY, 96, 40),
}
_LONG, _TALL = (3, _WIDE), (_MANY, 64)

SIZES: dict[str, _Check] = {
    **{f"linear-{name}": _of_size(_linear, True, sizes) for name, sizes in _PRODUCTS.items()},
    **{f"linear-packed-{n}": _of_size(_linear_role, sizes) for n, sizes in _PRODUCTS.items()},
    "rms_norm-wide": _of_size(_norm, _LONG),
    "rms_norm-many-rows": _of_size(_norm, _TALL),
    "add_rms_norm-wide": _of_size(_add_norm, _LONG),
    "add_rms_norm-many-rows": _of_size(_add_norm, _TALL),
    "silu_mul-wide": _of_size(_gate, "silu_mul", _LONG),
    "silu_mul-many-rows": _of_size(_gate, "silu_mul", _TALL),
    "gelu_mul-wide": _of_size(_gate, "gelu_mul", _LONG),
    "rows-wide": _wide_rows,
}
"""Sizes of real models: one row, many rows, and rows longer than a block of a kernel."""


def _core(name: str, check: _Check) -> Case:
    return Case(f"B.layer[{name}]", lambda kit: check(kit, kit.dtype, kit.rng))


def _in_dtype(name: str, check: _Check, dtype: str) -> Case:
    def not_claimed(kit: Kit) -> str | None:
        if dtype not in kit.backend.caps.compute_dtypes:
            return f"dtype {dtype} is not claimed"
        return kit.backend.caps.why_not(OpSpec(name.partition("-")[0], dtype=dtype))

    return Case(
        f"B.layer[{name}-{dtype}]", lambda kit: check(kit, dtype, kit.rng), "full", not_claimed
    )


CASES = [
    *(_core(name, check) for name, check in {**CHECKS, **SIZES}.items()),
    *(
        _in_dtype(n, check, dtype)
        for n, check in CHECKS.items()
        for dtype in _DTYPES
        if n != "collectives"
    ),
]
