"""Copies whole blocks within the cache, in place, without passing through the core."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from leadframe_tpu.kernels.attention import Interpret


def copy_blocks(
    cache: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array, interpret: Interpret
) -> jax.Array:
    """Copies block src[i] to block dst[i] for i < count and returns the cache, same memory.

    Args:
      cache: [num_blocks, block_size, lanes].
      src: int32 [n].
      dst: int32 [n]; no block of it is in `src`.
      count: int32 [1], at most n.
      interpret: how the kernel runs.
    """
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out: jax.Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_copy",
    )(src, dst, count, cache)
    return out


def _kernel(src: Any, dst: Any, count: Any, old: Any, cache: Any, done: Any) -> None:
    del old  # the same memory as `cache`

    def copy(index: Any) -> Any:
        return pltpu.make_async_copy(cache.at[src[index]], cache.at[dst[index]], done)

    lax.fori_loop(0, count[0], lambda index, _: copy(index).start(), None)
    lax.fori_loop(0, count[0], lambda index, _: copy(index).wait(), None)
