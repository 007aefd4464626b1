"""Paged attention for rows of one token, with the context split over programs."""

from __future__ import annotations

import triton
import triton.language as tl

from leadframe_triton.kernels.tile import attend_range, store_normalised


@triton.jit
def _split_plan(
    length, window, split_tokens, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """How a row's context is cut: (first key, aligned start, keys a split, splits in use).

    A split takes at least `split_tokens` keys, and more when `num_splits` would not cover the
    row. With num_splits * split_tokens at or above every context (batch-invariant mode) the cut
    of a row depends on the row alone.
    """
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    start = first // BLOCK_N * BLOCK_N
    span = length - start
    even = tl.cdiv(tl.cdiv(span, num_splits), BLOCK_N) * BLOCK_N
    size = tl.maximum(even, split_tokens)
    return first, start, size, tl.cdiv(span, size)


_COUNTS = ["table_stride", "split_tokens", "num_splits", "window"]
_BATCH = ["seq_lens_ptr", "table_ptr"]


@triton.jit(do_not_specialize=_COUNTS + _BATCH)
def decode_attention_kernel(
    out_ptr, part_ptr, part_m_ptr, part_l_ptr, q_ptr, k_ptr, v_ptr, seq_lens_ptr, table_ptr,
    table_stride, split_tokens, num_splits,
    stride_q, stride_out, stride_block, stride_slot, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row i owns token i. Grid: (KV heads, rows, splits).

    With SPLIT, each program leaves float32 partials for `combine_splits_kernel`: the sum
    [rows, heads, splits, D] before normalisation, the maximum and the denominator
    [rows, heads, splits]. Programs of splits that the row does not need write nothing.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens_ptr + row)
    first, start, size, used = _split_plan(
        length, window, split_tokens, num_splits, HAS_WINDOW, BLOCK_N
    )
    if SPLIT:
        if split >= used:
            return
    start += split * size
    end = tl.minimum(start + size, length)

    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    keep = (g[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    head = kv_head * GROUP + g
    offset = (head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * stride_q + offset, mask=keep, other=0.0)
    acc, m, total = attend_range(
        q, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
        table_ptr + row.to(tl.int64) * table_stride,
        tl.zeros([BLOCK_M], dtype=tl.int32) + (length - 1),
        first, length, start, end // BLOCK_N * BLOCK_N, end,
        stride_block, stride_slot, scale, softcap, window,
        BLOCK_M, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    if SPLIT:
        heads = tl.num_programs(0) * GROUP
        part = (row.to(tl.int64) * heads + head) * num_splits + split
        tl.store(part_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=keep)
        tl.store(part_m_ptr + part, m, mask=g < GROUP)
        tl.store(part_l_ptr + part, total, mask=g < GROUP)
    else:
        store_normalised(out_ptr, row.to(tl.int64) * stride_out + offset, acc, total, keep)


@triton.jit(do_not_specialize=["split_tokens", "num_splits", "window", "seq_lens_ptr"])
def combine_splits_kernel(
    out_ptr, part_ptr, part_m_ptr, part_l_ptr, seq_lens_ptr,
    split_tokens, num_splits, stride_out, window,
    HEAD_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Adds up the partials of one row and head, BLOCK_S splits at a time, always in order.

    Grid: (heads, rows). BLOCK_N is the one of the decode kernel: both must cut a row alike.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    _, _, _, used = _split_plan(
        tl.load(seq_lens_ptr + row), window, split_tokens, num_splits, HAS_WINDOW, BLOCK_N
    )
    base = (row.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    m = float("-inf")
    for s in range(0, used, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        live = split < used
        part_m = tl.load(part_m_ptr + base + split, mask=live, other=float("-inf"))
        part_l = tl.load(part_l_ptr + base + split, mask=live, other=0.0)
        part = tl.load(
            part_ptr + (base + split)[:, None] * HEAD_DIM + d[None, :],
            mask=live[:, None] & (d[None, :] < HEAD_DIM),
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(part_m, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(part_m - m_new)
        total = total * alpha + tl.sum(part_l * weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m = m_new
    out = acc / tl.where(total == 0.0, 1.0, total)
    offset = row.to(tl.int64) * stride_out + head * HEAD_DIM + d
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
