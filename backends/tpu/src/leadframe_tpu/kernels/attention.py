"""Paged attention: one pass over the keys of each tile of queries.

The keys of a tile arrive in *panels* of several blocks. While one panel is computed on, the next
one, of this tile or of the next live one, is copied into the other half of a double buffer.
Queries and outputs move the same way, token by token where a tile is not full. Softmax is online,
in float32 and base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from leadframe.platform.capabilities import AttnParams
from leadframe_tpu.kernels.layout import LANES, KVBlocks, lane_width
from leadframe_tpu.kernels.scalars import ceil_div, div
from leadframe_tpu.kernels.work import Tiles

Interpret = Any
"""False, True, or `pltpu.InterpretParams`."""

_MASKED: Final = -1e30  # finite, so that a query that sees nothing has no inf - inf
_LOG2_E: Final = math.log2(math.e)
_SUBLANES: Final = 8
_PANEL_BYTES: Final = 2 << 20
_MAX_PANEL_KEYS: Final = 512
_MAX_SCORES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Shape:
    """The static sizes of one kernel.

    Attributes:
      params: constants of the layer.
      heads: KV heads.
      queries: most queries of a tile.
      group: query heads that share a KV head.
      head_dim: D.
      block: tokens a block.
      panel_blocks: blocks a panel.
    """

    params: AttnParams
    heads: int
    queries: int
    group: int
    head_dim: int
    block: int
    panel_blocks: int

    @property
    def rows(self) -> int:
        """Query rows of a KV head; row r is query r % queries of query head r // queries."""
        return self.queries * self.group

    @property
    def single_rows(self) -> int:
        """Query rows of a KV head where a tile has one query, in whole registers."""
        return -(-self.group // _SUBLANES) * _SUBLANES

    @property
    def panel(self) -> int:
        """Keys a panel."""
        return self.block * self.panel_blocks

    @property
    def width(self) -> int:
        """Lanes of a KV head."""
        return lane_width(self.head_dim)

    @property
    def is_split(self) -> bool:
        """Whether K and V each fill whole registers, so that either can be read alone."""
        return self.head_dim % LANES == 0

    @property
    def lanes(self) -> int:
        """Lanes of a query and of an output: K's with V's where the two share registers."""
        return self.head_dim if self.is_split else self.width


def attend_tiles(
    q: jax.Array,
    kv: KVBlocks,
    groups: Sequence[Tiles],
    params: AttnParams,
    queries: int,
    interpret: Interpret,
) -> jax.Array:
    """Attends with every tile of every group, one kernel call a group.

    Args:
      q: [T, H, D].
      kv: the layer.
      groups: which tokens attend to which keys; every token is in one group at most.
      params: constants of the layer.
      queries: most queries of a tile.
      interpret: how the kernel runs.

    Returns:
      [T, H, D] float32; whatever was in memory for tokens that are in no tile.
    """
    _, num_heads, dim = q.shape
    group = num_heads // kv.num_stored_heads
    shape = _shape_for(kv, queries, group, groups[0].num_blocks, params)
    q = q.astype(jnp.float32)  # 32-bit rows can be read and written one by one
    if not shape.is_split:  # zeros against V's lanes make q · [K|V] equal q · K
        q = jnp.pad(q, ((0, 0), (0, 0), (0, shape.lanes - dim)))
    out = None
    for tiles in groups:  # into the same memory: outputs of their own would have to be merged
        out = _call(q, kv.data, tiles, shape, interpret, out)
    assert out is not None, "there is a group"
    # Where registers are shared, weights · [K|V] has weights · V in V's lanes.
    return out if shape.is_split else out[..., dim : 2 * dim]


def _shape_for(
    kv: KVBlocks, queries: int, group: int, num_blocks: int, params: AttnParams
) -> _Shape:
    """Chooses panels that hide the latency of memory and leave room for the scores."""
    heads = kv.num_stored_heads
    row_bytes = kv.data.shape[2] * kv.data.dtype.itemsize
    scores = _MAX_SCORES // (heads * queries * group)
    keys = min(_MAX_PANEL_KEYS, _PANEL_BYTES // row_bytes, scores)
    panel_blocks = max(1, min(keys // kv.block_size, num_blocks))
    return _Shape(params, heads, queries, group, kv.head_dim, kv.block_size, panel_blocks)


def _call(
    q: jax.Array,
    kv: jax.Array,
    tiles: Tiles,
    shape: _Shape,
    interpret: Interpret,
    begun: jax.Array | None,
) -> jax.Array:
    """Calls the kernel for one group; `begun` is what earlier groups have written."""
    dtype = jnp.bfloat16 if kv.dtype == jnp.bfloat16 else jnp.float32
    rows = max(shape.rows, shape.single_rows)
    token = (shape.queries, *q.shape[1:])
    state = [(shape.heads, rows, size) for size in (LANES, LANES, shape.lanes)]
    scalars = (
        tiles.block_table,
        tiles.next_live,
        tiles.table_start,
        tiles.first_key,
        tiles.end_key,
        tiles.position,
        tiles.first_token,
        tiles.num_queries,
    )
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands = (q, kv) if begun is None else (q, kv, begun)
    first, end = len(scalars) + 2, len(scalars) + len(operands)  # `begun` is the output's memory
    out: jax.Array = pl.pallas_call(
        lambda *refs: _kernel(_Refs(*refs[:first], *refs[end:]), shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.position.shape[0],),
            in_specs=[in_hbm] * len(operands),
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((2, shape.panel, kv.shape[2]), kv.dtype),
                pltpu.VMEM(token, jnp.float32),
                pltpu.VMEM(token, jnp.float32),
                pltpu.VMEM((shape.heads, rows, shape.lanes), dtype),
                *(pltpu.VMEM(size, jnp.float32) for size in state),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((4,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        input_output_aliases={} if begun is None else {first: 0},
        compiler_params=pltpu.CompilerParams(
            # In order: a tile starts the copies that the next one waits for.
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,  # they double the loop that starts copies
            vmem_limit_bytes=_vmem_bytes(kv, shape),
        ),
        cost_estimate=_cost(q, kv, tiles, shape),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *operands)
    return out


def _vmem_bytes(kv: jax.Array, shape: _Shape) -> int:
    """An upper bound of what the kernel needs, so that XLA may use the rest."""
    rows = shape.heads * max(shape.rows, shape.single_rows)
    state = 4 * rows * (4 * shape.lanes + 2 * LANES)
    panels = 3 * shape.panel * kv.shape[2] * kv.dtype.itemsize
    scores = 4 * 4 * rows * shape.panel
    return (8 << 20) + 2 * (state + panels + scores)


def _cost(q: jax.Array, kv: jax.Array, tiles: Tiles, shape: _Shape) -> pl.CostEstimate:
    """What the call costs if every row is half as long as its block table."""
    keys = tiles.num_blocks * shape.block // 2
    scores = q.shape[0] * q.shape[1] * keys
    read = tiles.position.shape[0] * keys * kv.shape[2] * kv.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * shape.head_dim,
        transcendentals=scores,
        bytes_accessed=read + 2 * q.size * q.dtype.itemsize,
    )


@dataclass(frozen=True, slots=True)
class _Refs:
    """The memories of one kernel: the scalars of `Tiles`, operands, then scratch."""

    block_table: Any
    next_live: Any
    table_start: Any
    first_key: Any
    end_key: Any
    position: Any
    first_token: Any
    num_queries: Any
    q: Any  # [T, H, lanes] in HBM
    kv: Any  # [num_blocks, block, heads * width] in HBM
    out: Any  # [T, H, lanes] in HBM
    panels: Any  # [2, panel, heads * width]
    arriving: Any  # [queries, H, lanes], the queries of the next live tile
    leaving: Any  # [queries, H, lanes], the output of the tile before
    rows: Any  # [heads, rows, lanes], the queries of this tile
    peak: Any  # [heads, rows, LANES], the largest score so far
    total: Any  # [heads, rows, LANES], the sum of weights so far
    acc: Any  # [heads, rows, lanes], the weighted sum of V so far
    state: Any  # int32 [2]: the half of `panels` to read next; the tile in `leaving`, or -1
    done: Any  # DMA semaphores [4]: the two halves of `panels`, `arriving`, `leaving`


def _kernel(refs: _Refs, shape: _Shape) -> None:
    tile, num_tiles = pl.program_id(0), pl.num_programs(0)

    @pl.when(tile == 0)
    def _first() -> None:
        refs.state[0] = 0
        refs.state[1] = -1
        first = refs.next_live[0]

        @pl.when(first < num_tiles)
        def _fetch() -> None:
            _move_queries(refs, shape, first, _start)
            _move_panel(refs, shape, first, div(refs.first_key[first], shape.panel), 0, _start)

    is_live = refs.first_key[tile] < refs.end_key[tile]
    if shape.queries == 1:
        pl.when(is_live)(lambda: _attend(refs, shape, tile, is_single=True))
    else:
        is_single = refs.num_queries[tile] == 1
        pl.when(is_live & is_single)(lambda: _attend(refs, shape, tile, is_single=True))
        pl.when(is_live & ~is_single)(lambda: _attend(refs, shape, tile, is_single=False))

    @pl.when(tile == num_tiles - 1)
    def _last() -> None:
        _finish_output(refs, shape)


_Act = Callable[[Any], None]


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _move_panel(refs: _Refs, shape: _Shape, tile: Any, panel: Any, half: Any, act: _Act) -> None:
    """Starts, or waits for, the copies of those blocks of a panel that the tile reads."""
    first_block = panel * shape.panel_blocks
    end_block = ceil_div(refs.end_key[tile], shape.block)
    first = jnp.maximum(div(refs.first_key[tile], shape.block), first_block)
    end = jnp.minimum(end_block, first_block + shape.panel_blocks)

    def one(block: Any, _: None) -> None:
        place = pl.multiple_of((block - first_block) * shape.block, shape.block)
        block_id = refs.block_table[refs.table_start[tile] + block]
        target = refs.panels.at[half, pl.ds(place, shape.block)]
        act(pltpu.make_async_copy(refs.kv.at[block_id], target, refs.done.at[half]))

    lax.fori_loop(first, end, one, None)


def _move_queries(refs: _Refs, shape: _Shape, tile: Any, act: _Act) -> None:
    _move_tokens(refs, shape, tile, refs.q, refs.arriving, refs.done.at[2], act, inward=True)


def _move_output(refs: _Refs, shape: _Shape, tile: Any, act: _Act) -> None:
    _move_tokens(refs, shape, tile, refs.out, refs.leaving, refs.done.at[3], act, inward=False)


def _move_tokens(
    refs: _Refs,
    shape: _Shape,
    tile: Any,
    outside: Any,
    inside: Any,
    done: Any,
    act: _Act,
    *,
    inward: bool,
) -> None:
    """Starts, or waits for, the copies of a tile's tokens: at once if it is full."""
    first, count = refs.first_token[tile], refs.num_queries[tile]

    def move(start: Any, size: int) -> None:
        far, near = outside.at[pl.ds(first + start, size)], inside.at[pl.ds(start, size)]
        src, dst = (far, near) if inward else (near, far)
        act(pltpu.make_async_copy(src, dst, done))

    if shape.queries == 1:
        move(0, 1)
        return
    is_full = count == shape.queries
    if shape.queries <= outside.shape[0]:
        pl.when(is_full)(lambda: move(0, shape.queries))
    pl.when(~is_full)(lambda: lax.fori_loop(0, count, lambda at, _: move(at, 1), None))


def _attend(refs: _Refs, shape: _Shape, tile: Any, *, is_single: bool) -> None:
    """Computes a live tile. One query uses the first rows only, so that decodes cost little."""
    rows = shape.single_rows if is_single else shape.rows
    _move_queries(refs, shape, tile, _wait)
    _take_queries(refs, shape, is_single=is_single)
    following = refs.next_live[tile + 1]
    is_not_last = following < pl.num_programs(0)
    pl.when(is_not_last)(lambda: _move_queries(refs, shape, following, _start))
    at = slice(0, rows)
    refs.peak[:, at] = jnp.full((shape.heads, rows, LANES), _MASKED, jnp.float32)
    refs.total[:, at] = jnp.zeros((shape.heads, rows, LANES), jnp.float32)
    refs.acc[:, at] = jnp.zeros((shape.heads, rows, shape.lanes), jnp.float32)
    _walk_panels(refs, shape, tile, rows)
    _finish_output(refs, shape)
    _give_output(refs, shape, rows, is_single=is_single)
    _move_output(refs, shape, tile, _start)
    refs.state[1] = tile


def _take_queries(refs: _Refs, shape: _Shape, *, is_single: bool) -> None:
    """Gathers the queries of each KV head, so that one product serves all of them."""
    for head in range(shape.heads):
        first = head * shape.group
        if is_single:
            queries = refs.arriving[0, first : first + shape.group, :]
            refs.rows[head, 0 : shape.group] = queries.astype(refs.rows.dtype)
            continue
        for member in range(shape.group):
            queries = refs.arriving[:, first + member, :]
            at = slice(member * shape.queries, (member + 1) * shape.queries)
            refs.rows[head, at] = queries.astype(refs.rows.dtype)


def _give_output(refs: _Refs, shape: _Shape, rows: int, *, is_single: bool) -> None:
    """Scatters the output of each KV head back to its query heads."""
    for head in range(shape.heads):
        total = refs.total[head, 0:rows, :1]
        out = refs.acc[head, 0:rows] / jnp.where(total > 0, total, 1.0)
        first = head * shape.group
        if is_single:
            refs.leaving[0, first : first + shape.group, :] = out[: shape.group]
            continue
        for member in range(shape.group):
            at = slice(member * shape.queries, (member + 1) * shape.queries)
            refs.leaving[:, first + member, :] = out[at]


def _finish_output(refs: _Refs, shape: _Shape) -> None:
    """Waits for the output of the live tile before, if there was one."""
    before = refs.state[1]
    pl.when(before >= 0)(lambda: _move_output(refs, shape, before, _wait))


def _walk_panels(refs: _Refs, shape: _Shape, tile: Any, rows: int) -> None:
    first = div(refs.first_key[tile], shape.panel)
    end = ceil_div(refs.end_key[tile], shape.panel)

    def one(panel: Any, half: Any) -> Any:
        is_last = panel + 1 == end
        then = jnp.where(is_last, refs.next_live[tile + 1], tile)

        @pl.when(then < pl.num_programs(0))
        def _fetch() -> None:
            first_panel = div(refs.first_key[then], shape.panel)
            following = jnp.where(is_last, first_panel, panel + 1)
            _move_panel(refs, shape, then, following, 1 - half, _start)

        _move_panel(refs, shape, tile, panel, half, _wait)
        _scrub(refs, shape, tile, panel, half)
        _accumulate(refs, shape, tile, panel, half, rows)
        return 1 - half

    refs.state[0] = lax.fori_loop(first, end, one, refs.state[0])


def _scrub(refs: _Refs, shape: _Shape, tile: Any, panel: Any, half: Any) -> None:
    """Zeroes the keys of a panel that no query of the tile sees.

    They hold whatever was there: a weight of zero times a NaN would be a NaN.
    """
    base = panel * shape.panel
    first, end = refs.first_key[tile], refs.end_key[tile]

    @pl.when((base < first) | (base + shape.panel > end))
    def _partial() -> None:
        key = base + lax.broadcasted_iota(jnp.int32, (shape.panel, 1), 0)
        held = refs.panels[half]
        refs.panels[half] = jnp.where((key >= first) & (key < end), held, jnp.zeros_like(held))


def _accumulate(refs: _Refs, shape: _Shape, tile: Any, panel: Any, half: Any, rows: int) -> None:
    """Adds a panel to the running softmax, all heads side by side to hide latencies."""
    at, heads = slice(0, rows), range(shape.heads)
    keys, values = zip(*(_key_and_value(refs, shape, half, head) for head in heads), strict=True)
    scores = jnp.stack([_dot(refs.rows[head, at], keys[head], ((1,), (1,))) for head in heads])
    scores = jnp.where(_sees(refs, shape, tile, panel, rows), _logits(scores, shape), _MASKED)
    old = refs.peak[:, at]
    new = jnp.maximum(old, jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp2(scores - new[:, :, :1])
    decay = jnp.exp2(old - new)
    refs.peak[:, at] = new
    refs.total[:, at] = decay * refs.total[:, at] + jnp.sum(weights, axis=2, keepdims=True)
    weights = weights.astype(refs.rows.dtype)
    sums = jnp.stack([_dot(weights[head], values[head], ((1,), (0,))) for head in heads])
    refs.acc[:, at] = decay[:, :, :1] * refs.acc[:, at] + sums


def _key_and_value(refs: _Refs, shape: _Shape, half: Any, head: int) -> tuple[Any, Any]:
    """K and V [panel, lanes] of one head; both are [K|V] where they share registers."""
    start = head * shape.width
    k = refs.panels[half, :, start : start + shape.lanes]
    if not shape.is_split:
        return k, k
    start += shape.head_dim
    return k, refs.panels[half, :, start : start + shape.lanes]


def _dot(a: Any, b: Any, axes: tuple[tuple[int], tuple[int]]) -> Any:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _logits(scores: Any, shape: _Shape) -> Any:
    """Scaled and capped scores, times log2(e) because weights are powers of two."""
    scale, cap = shape.params.scale, shape.params.softcap
    if cap is None:
        return scores * (scale * _LOG2_E)
    return jnp.tanh(scores * (scale / cap)) * (cap * _LOG2_E)


def _sees(refs: _Refs, shape: _Shape, tile: Any, panel: Any, rows: int) -> Any:
    """Bool [1, rows, panel]: which keys a query row may look at."""
    size = (1, rows, shape.panel)
    key = panel * shape.panel + lax.broadcasted_iota(jnp.int32, size, 2)
    query = refs.position[tile]
    if rows == shape.rows:
        query = query + (lax.broadcasted_iota(jnp.int32, size, 1) & (shape.queries - 1))
    sees = (key <= query) & (key < refs.end_key[tile])
    if shape.params.window is not None:
        sees &= key > query - shape.params.window
    return sees
