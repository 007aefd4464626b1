"""Writes K and V into the cache in place.

A token is one row of a block, but memory moves in tiles of `ROW_TILE` rows, so each run is read,
changed and written back. Runs follow each other through a ring of buffers: several reads are
ahead of the run that is being changed and several writes behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from leadframe_tpu.kernels.attention import Interpret
from leadframe_tpu.kernels.layout import LANES, ROW_TILE
from leadframe_tpu.kernels.scalars import div, rem
from leadframe_tpu.kernels.work import PIPELINE_DEPTH, TOKEN_TILE, Runs

_WRITE_LAG: Final = PIPELINE_DEPTH // 2
"""Writes that may be under way while the next run is changed."""


@dataclass(frozen=True, slots=True)
class _Refs:
    """The memories of the kernel: the scalars of `Runs`, operands, then scratch."""

    bounds: Any
    token: Any
    slot: Any
    length: Any
    must_wait: Any
    rows: Any  # [tokens, lanes], this step's K and V
    old: Any  # the cache as an input; the output is the same memory
    cache: Any  # [num_blocks, block, lanes], left in HBM
    staged: Any  # float32 [lanes / LANES, ROW_TILE + tokens + ROW_TILE, LANES]
    ring: Any  # [PIPELINE_DEPTH, ROW_TILE, lanes]
    read: Any  # DMA semaphores [PIPELINE_DEPTH]
    written: Any  # DMA semaphores [PIPELINE_DEPTH]


def append_rows(cache: jax.Array, rows: jax.Array, runs: Runs, interpret: Interpret) -> jax.Array:
    """Writes rows to their slots and returns the cache, in the same memory.

    Args:
      cache: [num_blocks, block_size, lanes].
      rows: [T, lanes] in the cache's dtype.
      runs: where they go.
      interpret: how the kernel runs.
    """
    num_tokens, lanes = rows.shape
    tokens = min(num_tokens, TOKEN_TILE)
    scalars = (runs.bounds, runs.token, runs.slot, runs.length, runs.must_wait)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    staged_rows = tokens + 2 * ROW_TILE
    out: jax.Array = pl.pallas_call(
        lambda *refs: _kernel(_Refs(*refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(num_tokens, tokens),),
            in_specs=[pl.BlockSpec((tokens, lanes), lambda i, *_: (i, 0)), in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((lanes // LANES, staged_rows, LANES), jnp.float32),
                pltpu.VMEM((PIPELINE_DEPTH, ROW_TILE, lanes), cache.dtype),
                pltpu.SemaphoreType.DMA((PIPELINE_DEPTH,)),
                pltpu.SemaphoreType.DMA((PIPELINE_DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=(8 << 20) + 2 * staged_rows * lanes * (4 + 2 * rows.dtype.itemsize),
        ),
        interpret=interpret,
        name="kv_append",
    )(*scalars, rows, cache)
    return out


def _kernel(refs: _Refs) -> None:
    step = pl.program_id(0)
    first, end = refs.bounds[step], refs.bounds[step + 1]
    _stage(refs)

    def one(run: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        written, reading = carry
        wanted = jnp.where(refs.must_wait[run] == 1, run, run - _WRITE_LAG + 1)
        written = _finish_writes(refs, written, wanted)
        reading = _start_reads(refs, reading, jnp.minimum(end, written + PIPELINE_DEPTH), run)
        _read(refs, run).wait()
        _change(refs, run, step)
        _write(refs, run).start()
        return written, reading

    written, _ = lax.fori_loop(first, end, one, (first, first))
    _finish_writes(refs, written, end)


def _stage(refs: _Refs) -> None:
    """Copies the rows to where any eight of them can be read: 32-bit, one register wide."""
    tokens, lanes = refs.rows.shape
    for index, start in enumerate(range(0, lanes, LANES)):
        rows = refs.rows[:, start : start + LANES].astype(jnp.float32)
        refs.staged[index, pl.ds(ROW_TILE, tokens), :] = rows


def _home(refs: _Refs, run: Any) -> Any:
    """The rows of the cache that a run is part of."""
    block_size = refs.cache.shape[1]
    slot = refs.slot[run]
    row = div(rem(slot, block_size), ROW_TILE) * ROW_TILE
    rows = pl.ds(pl.multiple_of(row, ROW_TILE), ROW_TILE)
    return refs.cache.at[div(slot, block_size), rows]


def _read(refs: _Refs, run: Any) -> Any:
    at = rem(run, PIPELINE_DEPTH)
    return pltpu.make_async_copy(_home(refs, run), refs.ring.at[at], refs.read.at[at])


def _write(refs: _Refs, run: Any) -> Any:
    at = rem(run, PIPELINE_DEPTH)
    return pltpu.make_async_copy(refs.ring.at[at], _home(refs, run), refs.written.at[at])


def _finish_writes(refs: _Refs, written: Any, wanted: Any) -> Any:
    """Waits until the runs before `wanted` are in memory; returns how far that now is."""
    lax.fori_loop(written, wanted, lambda run, _: _write(refs, run).wait(), None)
    return jnp.maximum(written, wanted)


def _start_reads(refs: _Refs, reading: Any, end: Any, current: Any) -> Any:
    """Starts reads up to `end`, or up to a run that must wait for those before it.

    Such a run is read when it becomes the current one: the writes are finished then.
    """

    def may_start(run: Any) -> Any:
        # Clamped, because the list has no entry at `end`.
        must_wait = refs.must_wait[jnp.minimum(run, end - 1)]
        return (run < end) & ((must_wait == 0) | (run == current))

    def start(run: Any) -> Any:
        _read(refs, run).start()
        return run + 1

    return lax.while_loop(may_start, start, reading)


def _change(refs: _Refs, run: Any, step: Any) -> None:
    """Puts the new rows of a run among the old rows of its tile."""
    tokens, lanes = refs.rows.shape
    at, inside = rem(run, PIPELINE_DEPTH), rem(refs.slot[run], ROW_TILE)
    start = refs.token[run] - step * tokens + ROW_TILE - inside
    row = lax.broadcasted_iota(jnp.int32, (ROW_TILE, LANES), 0)
    is_new = (row >= inside) & (row < inside + refs.length[run])
    for index, lane in enumerate(range(0, lanes, LANES)):
        new = refs.staged[index, pl.ds(start, ROW_TILE), :]
        old = refs.ring[at, :, lane : lane + LANES].astype(jnp.float32)
        mixed = jnp.where(is_new, new, old).astype(refs.ring.dtype)
        refs.ring[at, :, lane : lane + LANES] = mixed
