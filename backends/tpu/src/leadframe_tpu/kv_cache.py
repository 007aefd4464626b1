"""Layers of KV cache: their size, allocation, and the canonical layout in and out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from leadframe.errors import ContractViolation
from leadframe.platform.backend import KVLayerSpec, KVSpec
from leadframe_tpu.kernels.attention import Interpret
from leadframe_tpu.kernels.copy import copy_blocks
from leadframe_tpu.kernels.layout import KVBlocks, lane_width
from leadframe_tpu.ranks import KV_SPEC, Ranks

_MAX_COPIES = 256
"""Blocks that one call of the copy kernel takes; more are split."""

_Host = npt.NDArray[Any]


def layer_shape(
    spec: KVSpec, layer: KVLayerSpec, num_blocks: int, ranks: Ranks
) -> tuple[int, int, int]:
    """Returns the global shape of a layer's blocks."""
    lanes = ranks.kv_heads(layer.num_kv_heads) * lane_width(layer.head_dim)
    return num_blocks, spec.block_size, lanes


def block_bytes(spec: KVSpec, ranks: Ranks) -> int:
    """Returns the bytes of one block over all layers and ranks, padding included."""
    item = jnp.dtype(spec.dtype).itemsize
    return sum(item * int(np.prod(layer_shape(spec, layer, 1, ranks))) for layer in spec.layers)


def new_layer(spec: KVSpec, layer: KVLayerSpec, num_blocks: int, ranks: Ranks) -> KVBlocks:
    """Allocates a layer, zeroed."""
    shape = layer_shape(spec, layer, num_blocks, ranks)
    data = jnp.zeros(shape, jnp.dtype(spec.dtype), device=ranks.kv_sharding)
    return KVBlocks(data, layer.head_dim, layer.num_kv_heads)


def read_blocks(layer: KVBlocks, block_ids: Sequence[int]) -> _Host:
    """Reads blocks as [N, 2, block_size, kv_heads, head_dim]."""
    count = len(block_ids)
    rows = np.asarray(_gather(layer.data, _padded_ids(block_ids)))[:count]
    if rows.dtype == jnp.bfloat16:
        rows = rows.astype(np.float32)
    repeat = layer.num_stored_heads // layer.num_kv_heads
    rows = rows.reshape(count, layer.block_size, layer.num_stored_heads, -1)[:, :, ::repeat]
    both = np.stack([rows[..., : layer.head_dim], _values(rows, layer.head_dim)], axis=1)
    return np.ascontiguousarray(both)


def write_blocks(layer_d: KVBlocks, block_ids: Sequence[int], data: _Host) -> KVBlocks:
    """Writes blocks from [N, 2, block_size, kv_heads, head_dim], in place.

    Raises:
      ContractViolation: the data has another shape.
    """
    dim, count = layer_d.head_dim, len(block_ids)
    expected = (count, 2, layer_d.block_size, layer_d.num_kv_heads, dim)
    if data.shape != expected:
        raise ContractViolation("kv_write", [f"data is {data.shape}; it must be {expected}"])
    if not count:
        return layer_d
    heads, repeat = layer_d.num_kv_heads, layer_d.num_stored_heads // layer_d.num_kv_heads
    rows = np.zeros((count, layer_d.block_size, heads, lane_width(dim)), layer_d.data.dtype)
    rows[..., :dim] = data[:, 0]
    _values(rows, dim)[...] = data[:, 1]
    rows = np.repeat(rows, repeat, axis=2).reshape(count, layer_d.block_size, -1)
    ids = _padded_ids(block_ids)
    rows = np.concatenate([rows, np.repeat(rows[-1:], len(ids) - count, axis=0)])
    return layer_d.with_data(_scatter(layer_d.data, ids, rows))


def _values(rows: _Host, dim: int) -> _Host:
    """The lanes of V."""
    return rows[..., dim : 2 * dim]


def _padded_ids(block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Repeats the last id up to a power of two, so that few shapes are compiled."""
    ids = np.asarray(block_ids, np.int32)
    size = 1 << max(0, len(ids) - 1).bit_length()
    return np.pad(ids, (0, size - len(ids)), mode="edge" if len(ids) else "constant")


@jax.jit
def _gather(data: jax.Array, ids: jax.Array) -> jax.Array:
    return data[ids]


@partial(jax.jit, donate_argnums=(0,))
def _scatter(data: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return data.at[ids].set(rows)


class BlockCopier:
    """The op `kv_copy`: called by the engine with host arrays, between steps.

    Args:
      ranks: the devices.
      interpret: how the kernel runs.
    """

    def __init__(self, ranks: Ranks, interpret: Interpret) -> None:
        def copy(data: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array) -> jax.Array:
            return copy_blocks(data, src, dst, count, interpret)

        if ranks.count > 1:
            whole = jax.sharding.PartitionSpec()
            copy = jax.shard_map(
                copy,
                mesh=ranks.mesh,
                in_specs=(KV_SPEC, whole, whole, whole),
                out_specs=KV_SPEC,
                check_vma=False,
            )
        self._copy = jax.jit(copy, donate_argnums=(0,))

    def __call__(
        self, kv_d: KVBlocks, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
    ) -> KVBlocks:
        """Copies block src[i] to block dst[i], in place."""
        data = kv_d.data
        for start in range(0, len(src), _MAX_COPIES):
            ids = np.zeros((2, _MAX_COPIES), np.int32)
            part = slice(start, start + _MAX_COPIES)
            count = len(src[part])
            ids[0, :count], ids[1, :count] = src[part], dst[part]
            data = self._copy(data, ids[0], ids[1], np.array([count], np.int32))
        return kv_d.with_data(data)
