"""Writing to the KV cache: appending tokens and copying blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots_ptr"])
def kv_append_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    stride_block,
    stride_slot,
    stride_k,
    stride_v,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies the ROW = KV heads * D elements of each token to its slot. Grid: (tokens, ROW/BLOCK).

    Padded tokens all write slot 0; the order does not matter, nothing reads it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < ROW
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + column
    k = tl.load(k_ptr + token * stride_k + column, mask=keep)
    v = tl.load(v_ptr + token * stride_v + column, mask=keep)
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=keep)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["pairs_ptr"])
def kv_copy_kernel(k_cache_ptr, v_cache_ptr, pairs_ptr, stride_block, BLOCK: tl.constexpr):
    """Copies block pairs[i, 0] to block pairs[i, 1]. Grid: (pairs, block elements / BLOCK)."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < stride_block
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * stride_block + column
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * stride_block + column
    tl.store(k_cache_ptr + target, tl.load(k_cache_ptr + source, mask=keep), mask=keep)
    tl.store(v_cache_ptr + target, tl.load(v_cache_ptr + source, mask=keep), mask=keep)
