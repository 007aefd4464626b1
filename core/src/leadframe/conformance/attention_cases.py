"""Builds attention problems: a pool, a batch over it, queries, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.batches import BatchSpec, Padding, Row, live_tokens, make_batch
from leadframe.conformance.kit import ORACLE, Kit
from leadframe.platform import (
    KV,
    AttnParams,
    KVLayerSpec,
    KVSpec,
    OpSpec,
    StepArrays,
    StepBatch,
    unpack,
)

Floats = npt.NDArray[np.float64]

_FINEST_FIRST = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an attention problem.

    Attributes:
      heads: query heads.
      kv_heads: KV heads.
      dim: head dimension.
      block_size: tokens a block.
      decodes: seq_len of each decode row.
      chunks: (tokens in this step, seq_len) of each chunk row.
      padding: how much larger the bucket is.
      window: sliding window, if any.
      softcap: soft cap, if any.
      dtype: of queries, keys and values.
      shares: whether rows share their first blocks.
      kv_dtype: of the cache; None is `dtype`. Keys and values are then numbers that every type
        holds, 8-bit ones included.
    """

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    padding: Padding = field(default_factory=Padding)
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    shares: bool = False
    kv_dtype: str | None = None

    @property
    def params(self) -> AttnParams:
        """The constants of the layer."""
        return AttnParams.of(self.dim**-0.5, self.window, self.softcap)

    @property
    def precision(self) -> str:
        """The dtype whose roundings are allowed: a kernel may round weights to the cache's type."""
        coarser = [d for d in _FINEST_FIRST if d in (self.dtype, self.kv_dtype)]
        is_known = self.kv_dtype is None or self.kv_dtype in _FINEST_FIRST
        return coarser[-1] if is_known else _FINEST_FIRST[-1]

    @property
    def op_spec(self) -> OpSpec:
        """What attention is asked for this shape."""
        return OpSpec(
            "attention",
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            head_dim=self.dim,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            block_size=self.block_size,
            features=self.params.features,
        )


@dataclass(slots=True)
class Problem:
    """An attention problem on the host.

    Attributes:
      shape: its sizes.
      spec: the batch.
      batch: the same, packed.
      pool: canonical K and V [N, 2, block_size, K, D] before the step.
      q: [T, H, D].
      k: [T, K, D]; rows of padding hold garbage.
      v: [T, K, D].
      params: the constants of the layer.
    """

    shape: Shape
    spec: BatchSpec
    batch: StepBatch
    pool: Floats
    q: Floats
    k: Floats
    v: Floats
    params: AttnParams

    @property
    def kv_spec(self) -> KVSpec:
        """One layer."""
        s = self.shape
        return KVSpec((KVLayerSpec(s.kv_heads, s.dim),), s.block_size, s.kv_dtype or s.dtype)

    @property
    def arrays(self) -> StepArrays:
        """The batch unpacked on the host."""
        return unpack(self.batch.bucket, self.batch.ints, self.batch.floats)

    @property
    def live(self) -> npt.NDArray[np.int64]:
        """Tokens that are not padding."""
        return live_tokens(self.spec)


def make_spec(shape: Shape, rng: np.random.Generator) -> tuple[BatchSpec, int]:
    """Places rows on permuted blocks, some shared; returns the batch and the pool's size."""
    lens = [*((1, n) for n in shape.decodes), *shape.chunks]
    counts = [-(-seq_len // shape.block_size) for _, seq_len in lens]
    num_blocks = 2 + sum(counts) + 2
    ids = iter(rng.permutation(np.arange(2, num_blocks)))
    rows: list[Row] = []
    for (num_tokens, seq_len), count in zip(lens, counts, strict=True):
        blocks = [int(next(ids)) for _ in range(count)]
        if shape.shares and rows:
            # only blocks that no row writes in this step may be shared
            common = min(_old_blocks(rows[0], shape), (seq_len - num_tokens) // shape.block_size)
            blocks[:common] = rows[0].blocks[:common]
        rows.append(Row(num_tokens, seq_len, tuple(blocks)))
    spec = BatchSpec(tuple(rows), shape.block_size, len(shape.decodes), shape.padding)
    return spec, num_blocks


def _old_blocks(row: Row, shape: Shape) -> int:
    return (row.seq_len - row.num_tokens) // shape.block_size


def make_problem(shape: Shape, rng: np.random.Generator, poison: float = np.nan) -> Problem:
    """Makes a random problem whose unread slots hold poison."""
    spec, num_blocks = make_spec(shape, rng)
    batch = make_batch(spec)
    pool = np.full((num_blocks, 2, shape.block_size, shape.kv_heads, shape.dim), poison)
    for row in spec.rows:
        first = row.seq_len - row.num_tokens
        for position in range(first):
            if shape.window is None or position > first - shape.window:
                block = row.blocks[position // shape.block_size]
                values = _keys(shape, rng, 2)
                pool[block, :, position % shape.block_size] = values
    tokens = batch.bucket.num_tokens
    q = rng.standard_normal((tokens, shape.heads, shape.dim))
    k, v = _keys(shape, rng, 2, tokens)
    return Problem(shape, spec, batch, pool, q, k, v, shape.params)


def _keys(shape: Shape, rng: np.random.Generator, *count: int) -> Floats:
    """Draws keys or values, or both."""
    drawn = rng.standard_normal((*count, shape.kv_heads, shape.dim))
    return drawn if shape.kv_dtype is None else np.clip(np.round(drawn * 4) / 4, -1.75, 1.75)


def oracle_layer(pool: Floats) -> Floats:
    """Turns the canonical layout into the layout of the reference ops."""
    blocks, _, size, heads, dim = pool.shape
    return pool.transpose(0, 2, 1, 3, 4).reshape(blocks, size, 2 * heads, dim).copy()


def canonical(layer: Floats) -> Floats:
    """The inverse of `oracle_layer`."""
    blocks, size, heads, dim = layer.shape
    return layer.reshape(blocks, size, 2, heads // 2, dim).transpose(0, 2, 1, 3, 4)


@dataclass(slots=True)
class Outcome:
    """What a backend made of a problem, and what it should have made.

    Attributes:
      out: attention's result, [T, H, D].
      pool: the pool after the step, canonical.
      exact_out: the oracle's result.
      exact_pool: the pool as it must be; the null block may hold anything.
    """

    out: npt.NDArray[Any]
    pool: Floats
    exact_out: Floats
    exact_pool: Floats


def prepare(kit: Kit, problem: Problem) -> tuple[dict[str, Any], KV, Problem]:
    """Uploads a problem; returns weights, KV and the problem as it is after rounding."""
    shape, backend = problem.shape, kit.backend
    kv = backend.kv_alloc(problem.kv_spec, len(problem.pool))
    everything = list(range(len(problem.pool)))
    kv[0] = backend.kv_write(kv[0], everything, problem.pool.astype(np.float32))
    weights, rounded = {}, {}
    for name in ("q", "k", "v"):
        host = getattr(problem, name).astype(np.float32)
        weights[name], rounded[name] = kit.put(host, shape.dtype)
    pool = np.asarray(backend.kv_read(kv[0], everything)).astype(np.float64)
    return weights, kv, replace(problem, pool=pool, **rounded)


def attention_step(kit: Kit, problem: Problem) -> Any:
    """The step of a problem: append, then attend."""
    params = problem.params
    ops = kit.ops_for(replace(problem.shape.op_spec, features=params.features))

    def step(weights: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
        plan = ops.plan(arrays, params)
        layer = ops.kv_append(kv_d[0], weights["k"], weights["v"], plan)
        out = ops.attention(weights["q"], layer, plan, params)
        return {"out": out}, [layer]

    return step


def solve(kit: Kit, problem: Problem, capture: bool = False) -> Outcome:
    """Runs a problem on the backend and on the oracle."""
    weights, kv, exact = prepare(kit, problem)
    outputs, kv = kit.run(attention_step(kit, problem), problem.batch, weights, kv, capture)
    pool = np.asarray(kit.backend.kv_read(kv[0], list(range(len(problem.pool)))))
    kit.backend.kv_free(kv)
    exact_out, exact_pool = expected(exact)
    return Outcome(outputs["out"], pool.astype(np.float64), exact_out, exact_pool)


def expected(problem: Problem) -> tuple[Floats, Floats]:
    """The oracle's attention [T, H, D] and pool, for a problem after rounding."""
    layer = oracle_layer(problem.pool)
    layer = ORACLE["kv_append"](layer, problem.k, problem.v, problem.arrays)
    out = ORACLE["attention"](problem.q, layer, problem.arrays, problem.params)
    return out, canonical(layer)


def check_outcome(kit: Kit, problem: Problem, outcome: Outcome) -> None:
    """Attention close, padding finite, the new slots written, every other byte untouched."""
    kit.same("K/V of blocks other than the null block", outcome.pool[1:], outcome.exact_pool[1:])
    live = problem.live
    kit.close_to("attention", outcome.out[live], outcome.exact_out[live], problem.shape.precision)
    kit.check(bool(np.isfinite(outcome.out).all()), "attention of padded tokens is not finite")


__all__ = [
    "Outcome",
    "Problem",
    "Shape",
    "attention_step",
    "check_outcome",
    "expected",
    "make_problem",
    "make_spec",
    "oracle_layer",
    "prepare",
    "solve",
]
