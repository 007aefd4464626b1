"""Group B: attention and kv_append against the float64 oracle, with poison around the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from leadframe.conformance.attention_cases import (
    Shape,
    check_outcome,
    make_problem,
    prepare,
    solve,
)
from leadframe.conformance.batches import Padding
from leadframe.conformance.case import Case, Tier, naming
from leadframe.conformance.kit import Kit

PADDED = Padding(decodes=2, rows=2, tokens=5, blocks=3)
MIXED = Shape(decodes=(33, 1, 70), chunks=((20, 20), (7, 39)), padding=PADDED)

LAYOUTS = {
    "decode": Shape(decodes=(1, 5, 17, 40)),
    "prefill": Shape(chunks=((37, 37), (1, 1), (16, 16))),
    "chunked": Shape(chunks=((9, 41), (16, 32), (1, 50))),
    "mixed": Shape(decodes=(33, 1, 70), chunks=((20, 20), (7, 39))),
    "mixed-padded": MIXED,
    "decode-padded": Shape(decodes=(19, 3), padding=Padding(decodes=3, blocks=4)),
    "one-token": Shape(decodes=(1,)),
    "shared": replace(MIXED, decodes=(70, 40, 55), shares=True),
}
_EDGES = tuple(n * 16 + d for n in (1, 2, 4) for d in (-1, 0, 1))
GROUPINGS = ((2, 2), (3, 1), (6, 2), (8, 2), (8, 1))
LONG = Shape(decodes=(4099, 1025), chunks=((33, 4099),))
"""Over several splits of a context, however a kernel cuts it."""
HEAD_DIMS = (64, 80, 96, 128, 256)
_ANY_DIMS = (24, 40, 112, 192)
BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128)


def fit(kit: Kit, shape: Shape) -> Shape:
    """Takes a shape as near as the backend's capabilities allow, for what a case leaves open."""
    caps = kit.backend.caps
    dim, size, dtype = shape.dim, shape.block_size, shape.dtype
    if caps.head_dims is not None and dim not in caps.head_dims:
        dim = min(caps.head_dims, key=lambda have: abs(have - dim))
    if size not in caps.block_sizes:
        size = min(caps.block_sizes, key=lambda have: abs(have - size))
    if dtype not in caps.compute_dtypes or dtype not in caps.kv_dtypes:
        dtype = next(d for d in caps.compute_dtypes if d in caps.kv_dtypes)
    return replace(shape, dim=dim, block_size=size, dtype=dtype)


def not_claimed(kit: Kit, shape: Shape) -> str | None:
    """Why the backend says that it cannot do a shape, or None."""
    caps = kit.backend.caps
    missing = sorted(shape.params.features - caps.attention_features)
    if missing:
        return f"attention feature {missing[0]!r} is not claimed"
    if caps.head_dims is not None and shape.dim not in caps.head_dims:
        return f"head dim {shape.dim} is not claimed"
    if shape.block_size not in caps.block_sizes:
        return f"block size {shape.block_size} is not claimed"
    if shape.dtype not in caps.compute_dtypes or shape.dtype not in caps.kv_dtypes:
        return f"dtype {shape.dtype} is not claimed"
    return caps.why_not(shape.op_spec)


def run_shape(kit: Kit, shape: Shape, poison: float = np.nan, capture: bool = False) -> None:
    """Solves one problem and checks everything about its result."""
    problem = make_problem(shape, kit.rng, poison)
    check_outcome(kit, problem, solve(kit, problem, capture))


def _base(name: str, shape: Shape, poison: float = np.nan, tier: Tier = "core") -> Case:
    """A case that adapts to the backend, so that none may skip it."""
    return Case(f"B.attention[{name}]", lambda kit: run_shape(kit, fit(kit, shape), poison), tier)


def _claimed(name: str, shape: Shape, tier: str = "full", *open_: str) -> Case:
    """A case for one parameter; the rest adapts."""
    return Case(
        f"B.attention[{name}]",
        lambda kit: run_shape(kit, _keep(kit, shape, open_)),
        tier,  # type: ignore[arg-type]
        lambda kit: not_claimed(kit, _keep(kit, shape, open_)),
    )


def _keep(kit: Kit, shape: Shape, names: tuple[str, ...]) -> Shape:
    """Adapts a shape but for the named parameters."""
    return replace(fit(kit, shape), **{name: getattr(shape, name) for name in names})


def _null_block(kit: Kit) -> None:
    """Padding may write the null block as it likes; what it holds reaches nobody."""
    shape = fit(kit, replace(MIXED, padding=Padding(decodes=4, rows=3, tokens=9, blocks=5)))
    problem = make_problem(shape, kit.rng, np.inf)
    dead = np.setdiff1d(np.arange(problem.batch.bucket.num_tokens), problem.live)
    for array in (problem.k, problem.v, problem.q):
        array[dead] = np.nan
    outcome = solve(kit, problem)
    live = problem.live
    kit.close_to("attention", outcome.out[live], outcome.exact_out[live], shape.dtype)
    kit.same("K/V of blocks other than 0", outcome.pool[1:], outcome.exact_pool[1:])


def _copy(kit: Kit) -> None:
    """kv_copy moves whole blocks and touches no other."""
    shape = fit(kit, MIXED)
    problem = make_problem(shape, kit.rng, 3.0)
    _, kv, exact = prepare(kit, problem)
    num = len(problem.pool)
    ids = kit.rng.permutation(np.arange(1, num)).astype(np.int32)
    src, dst = ids[:3], ids[3:6]
    layer = kit.ops.kv_copy(kv[0], src, dst)
    pool = np.asarray(kit.backend.kv_read(layer, list(range(num)))).astype(np.float64)
    want = exact.pool.copy()
    want[dst] = want[src]
    kit.same("pool after kv_copy", pool, want)
    kit.backend.kv_free([layer])


def _poisons() -> list[Case]:
    values = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf, "huge": 3e38}
    names = [
        (name, value, layout)
        for layout in ("mixed-padded", "decode-padded")
        for name, value in values.items()
    ]
    return [
        _base(f"poison-{name}-{layout}", LAYOUTS[layout], value) for name, value, layout in names
    ]


def _features() -> list[Case]:
    out = []
    variants: dict[str, dict[str, float]] = {
        "window-3": {"window": 3},
        "window-16": {"window": 16},
        "window-17": {"window": 17},
        "window-1": {"window": 1},
        "softcap": {"softcap": 2.0},
        "window-softcap": {"window": 18, "softcap": 1.5},
    }
    for name, changes in variants.items():
        for layout in ("mixed-padded", "decode", "prefill"):
            shape = replace(LAYOUTS[layout], **changes)  # type: ignore[arg-type]
            out.append(_claimed(f"{name}-{layout}", shape, "core", *changes))
    return out


def _sweep() -> list[Case]:
    out = [
        _base("edges-decode", Shape(decodes=_EDGES)),
        _base("edges-prefill", Shape(chunks=tuple((n, n) for n in _EDGES[:6]))),
        _base("long-context", LONG, tier="full"),
    ]
    for heads, kv_heads in GROUPINGS:
        shape = replace(MIXED, heads=heads, kv_heads=kv_heads)
        out.append(_base(f"gqa-{heads}-{kv_heads}", shape))
    for dim in HEAD_DIMS:
        out.append(_claimed(f"dim-{dim}", replace(MIXED, dim=dim), "full", "dim"))
    for size in BLOCK_SIZES:
        out.append(_claimed(f"block-{size}", replace(MIXED, block_size=size), "full", "block_size"))
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for layout in ("mixed-padded", "decode"):
            shape = replace(LAYOUTS[layout], dtype=dtype)
            out.append(_claimed(f"{dtype}-{layout}", shape, "full", "dtype"))
    return out


def _large_scores(kit: Kit) -> None:
    """Scores in the thousands: the softmax must subtract the maximum first."""
    shape = fit(kit, MIXED)
    problem = make_problem(shape, kit.rng)
    problem = replace(problem, q=problem.q * 16, k=problem.k * 16)
    outcome = solve(kit, problem)
    got, want = outcome.out[problem.live], outcome.exact_out[problem.live]
    kit.check(bool(np.isfinite(got).all()), "attention overflows for large scores")
    error = np.abs(got - want).max() / np.abs(want).max()
    kit.check(error < 1000 * kit.tolerance("attention", shape.dtype), f"large scores: {error:.2e}")


def _kv_dtypes(kit: Kit) -> None:
    """A cache of every claimed type serves queries of another, which is what it is claimed for."""
    caps = kit.backend.caps
    for kv_dtype in caps.kv_dtypes:
        shapes = [
            replace(fit(kit, LAYOUTS["mixed-padded"]), dtype=dtype, kv_dtype=kv_dtype)
            for dtype in caps.compute_dtypes
        ]
        served = [shape for shape in shapes if caps.why_not(shape.op_spec) is None]
        kit.check(bool(served), f"KV dtype {kv_dtype} is claimed, and refused with every dtype")
        for shape in [s for s in served if s.dtype != kv_dtype][:1]:
            with naming(f"{shape.dtype} over KV in {kv_dtype}"):
                run_shape(kit, shape)


def _every_head_dim(kit: Kit) -> None:
    """What is claimed beyond the usual head dims; some of "any" where none is named."""
    claimed = kit.backend.caps.head_dims or _ANY_DIMS
    for dim in [dim for dim in claimed if dim not in HEAD_DIMS]:
        with naming(f"head dim {dim}"):
            run_shape(kit, replace(fit(kit, LAYOUTS["mixed-padded"]), dim=dim))


def _every_block_size(kit: Kit) -> None:
    """What is claimed beyond the usual block sizes."""
    claimed = kit.backend.caps.block_sizes
    for size in [size for size in claimed if size not in BLOCK_SIZES]:
        with naming(f"block size {size}"):
            run_shape(kit, replace(fit(kit, LAYOUTS["mixed-padded"]), block_size=size))


_EXTRA: dict[str, Callable[[Kit], None]] = {
    "B.attention[null-block-garbage]": _null_block,
    "B.attention[large-scores]": _large_scores,
    "B.attention[kv-dtypes]": _kv_dtypes,
    "B.kv_copy[blocks]": _copy,
}

CASES = [
    *(_base(name, shape) for name, shape in LAYOUTS.items()),
    *_poisons(),
    *_features(),
    *_sweep(),
    *(Case(name, run) for name, run in _EXTRA.items()),
    Case("B.attention[other-dims]", _every_head_dim, "full"),
    Case("B.attention[other-blocks]", _every_block_size, "full"),
]
