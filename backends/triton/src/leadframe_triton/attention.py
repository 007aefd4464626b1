"""Launches of the attention and cache kernels, with the signatures of `leadframe.platform.ops`.

A KV layer is one tensor [2, num_blocks, block_size, kv_heads, head_dim], K then V. The plan of a
step is its `StepArrays`: everything else is a constant of the model or of the bucket.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe_triton.kernels.cache import kv_append_kernel, kv_copy_kernel
from leadframe_triton.kernels.decode import combine_splits_kernel, decode_attention_kernel
from leadframe_triton.kernels.ragged import ragged_attention_kernel
from leadframe_triton.launch import LaunchContext, TileKey, ceil_div, power_of_two
from leadframe_triton.tiles import Kind, Tile, padded_head_dim

MIN_SPLIT_TOKENS = 256
"""A program of split decode that takes fewer keys costs more in partials than it saves."""

MOST_SPLIT_TOKENS = 16384
"""A row of many more keys would keep one program busy long after its neighbours are done."""

MAX_SPLITS = 64
_FULL = 0.85
"""The least share of the device's places that a wave of split decode should take."""
_MOST_WAVES = 4
_COMBINE_SPLITS = 16
_COPY_ELEMENTS = 4096
_APPEND_ELEMENTS = 2048


def kv_append(c: LaunchContext, kv_d: Tensor, k: Tensor, v: Tensor, plan: StepArrays) -> Tensor:
    """Writes K and V [T, K, D] to the slots of the batch, in place."""
    keys, values = kv_d[0], kv_d[1]
    num_tokens, heads, dim = k.shape
    k, v = _packed_heads(k), _packed_heads(v)
    block = min(power_of_two(heads * dim), _APPEND_ELEMENTS)
    kv_append_kernel[(num_tokens, ceil_div(heads * dim, block))](
        keys,
        values,
        k,
        v,
        plan.slots,
        keys.stride(0),
        keys.stride(1),
        k.stride(0),
        v.stride(0),
        ROW=heads * dim,
        BLOCK_SIZE=keys.shape[1],
        BLOCK=block,
        **c.options(c.warps(block)),
    )
    return kv_d


def kv_copy(
    c: LaunchContext, kv_d: Tensor, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
) -> Tensor:
    """Copies block src[i] to block dst[i], in place."""
    if not len(src):
        return kv_d
    pairs = torch.from_numpy(np.stack([src, dst], axis=1).astype(np.int32)).to(kv_d.device)
    keys, values = kv_d[0], kv_d[1]
    kv_copy_kernel[(len(src), ceil_div(keys.stride(0), _COPY_ELEMENTS))](
        keys, values, pairs, keys.stride(0), BLOCK=_COPY_ELEMENTS, **c.options(8)
    )
    return kv_d


def attention(
    c: LaunchContext, q: Tensor, kv: Tensor, plan: StepArrays, params: AttnParams
) -> Tensor:
    """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
    bucket = plan.bucket
    q = _packed_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if bucket.num_decodes:
        decode_attention(c, out, q, kv, plan, params)
    if bucket.num_tokens > bucket.num_decodes:
        ragged_attention(c, out, q, kv, plan, params, bucket.num_decodes)
    return out


def ragged_attention(
    c: LaunchContext,
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    plan: StepArrays,
    params: AttnParams,
    first_row: int = 0,
) -> None:
    """Rows [first_row, S) in one launch; row i < D owns token i, as everywhere.

    With first_row 0 it serves a whole mix, decodes included. It zeroes the tokens after
    query_start[S], which no row owns.
    """
    bucket = plan.bucket
    keys, values = kv[0], kv[1]
    tile, group, padded = _tile(c, "ragged", q, keys, params)
    block_m = max(tile.block_m, power_of_two(group))
    tiles = ceil_div(bucket.num_tokens - first_row, block_m // group) + bucket.num_seqs - first_row
    ragged_attention_kernel[(tiles, keys.shape[2])](
        out,
        q,
        keys,
        values,
        plan.query_start,
        plan.seq_lens,
        plan.block_table,
        bucket.num_tokens,
        bucket.num_seqs,
        first_row,
        bucket.num_blocks,
        q.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        float(params.scale),
        float(params.softcap or 0.0),
        params.window or 0,
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_SIZE=keys.shape[1],
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded,
        **c.options(tile.num_warps, tile.num_stages, tile.waves_per_eu),
    )


def decode_attention(
    c: LaunchContext, out: Tensor, q: Tensor, kv: Tensor, plan: StepArrays, params: AttnParams
) -> None:
    """Rows [0, D), one token each; the context of a row may be split over programs."""
    keys, values = kv[0], kv[1]
    tile, group, padded = _tile(c, "decode", q, keys, params)
    rows, kv_heads = plan.bucket.num_decodes, keys.shape[2]
    context = plan.bucket.num_blocks * keys.shape[1]
    if params.window is not None:
        context = min(context, params.window + tile.block_n)
    splits, split_tokens = split_of(c, rows * kv_heads, context, tile.block_n)
    # With fixed splits always through partials: one binary for a row, whatever its bucket.
    is_split = splits > 1 or c.split_tokens > 0
    part, part_m, part_l = _partials(q, rows * splits if is_split else 0)
    decode_attention_kernel[(kv_heads, rows, splits)](
        out,
        part,
        part_m,
        part_l,
        q,
        keys,
        values,
        plan.seq_lens,
        plan.block_table,
        plan.bucket.num_blocks,
        split_tokens,
        splits,
        q.stride(0),
        out.stride(0),
        keys.stride(0),
        keys.stride(1),
        float(params.scale),
        float(params.softcap or 0.0),
        params.window or 0,
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_SIZE=keys.shape[1],
        HAS_WINDOW=params.window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        SPLIT=is_split,
        BLOCK_M=max(tile.block_m, power_of_two(group)),
        BLOCK_N=tile.block_n,
        BLOCK_D=padded,
        **c.options(tile.num_warps, tile.num_stages, tile.waves_per_eu),
    )
    if is_split:
        cut = (split_tokens, splits, tile.block_n)
        _combine(c, out, (part, part_m, part_l), plan, params.window, cut)


def _combine(
    c: LaunchContext,
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    plan: StepArrays,
    window: int | None,
    cut: tuple[int, int, int],
) -> None:
    """Adds up the partials of the decode rows; `cut` is what they were split by."""
    split_tokens, splits, block_n = cut
    heads, dim = out.shape[1], out.shape[2]
    padded = padded_head_dim(dim)
    combine_splits_kernel[(heads, plan.bucket.num_decodes)](
        out,
        *parts,
        plan.seq_lens,
        split_tokens,
        splits,
        out.stride(0),
        window or 0,
        HEAD_DIM=dim,
        HAS_WINDOW=window is not None,
        BLOCK_N=block_n,
        BLOCK_D=padded,
        BLOCK_S=_COMBINE_SPLITS,
        **c.options(c.warps(_COMBINE_SPLITS * padded)),
    )


def split_of(c: LaunchContext, programs: int, context: int, block_n: int) -> tuple[int, int]:
    """How split decode cuts a bucket: (splits, least keys a split, a multiple of block_n).

    Args:
      c: the device; with `split_tokens` set, splits have that size whatever the batch.
      programs: rows times KV heads.
      context: the most keys that a row of the bucket may see.
      block_n: keys an iteration.
    """
    if c.split_tokens:
        size = ceil_div(c.split_tokens, block_n) * block_n
        return ceil_div(context, size), size
    size = ceil_div(MIN_SPLIT_TOKENS, block_n) * block_n
    most = max(1, min(ceil_div(context, size), MAX_SPLITS))
    splits = _filling_splits(2 * c.cores, programs, most)
    return max(splits, min(most, ceil_div(context, MOST_SPLIT_TOKENS))), size


def _filling_splits(places: int, programs: int, most: int) -> int:
    """Splits that fill whole waves of `places` programs: a wave with few takes as long as one."""
    splits = 1
    if programs >= 0.8 * places:
        return splits
    for waves in range(1, _MOST_WAVES + 1):
        splits = min(most, waves * places // programs)
        if splits == most or splits * programs >= _FULL * waves * places:
            break
    return splits


def _partials(q: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 buffers for `count` partials of every head; small stand-ins for none."""
    heads, dim = q.shape[1], q.shape[2]
    size = max(count * heads, 1)
    part = torch.empty(size * dim, dtype=torch.float32, device=q.device)
    # Multiples of 16 bytes: a pointer that loses its alignment would compile the kernel anew.
    ends = torch.empty((2, ceil_div(size, 4) * 4), dtype=torch.float32, device=q.device)
    return part, ends[0], ends[1]


def _tile(
    c: LaunchContext, kind: Kind, q: Tensor, keys: Tensor, params: AttnParams
) -> tuple[Tile, int, int]:
    """The tile of a launch, query heads a KV head, and the padded head dim."""
    dim, group = q.shape[2], q.shape[1] // keys.shape[2]
    windowed = params.window is not None
    key = TileKey(kind, dim, group, q.element_size(), keys.shape[1], windowed)
    return c.choose_tile(c.arch, key), group, padded_head_dim(dim)


def _packed_heads(x: Tensor) -> Tensor:
    """X [T, heads, D] with the heads of a token next to each other; tokens may be apart."""
    is_packed = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if is_packed else x.contiguous()
