"""Paged attention for rows of any length in one launch: chunks, decodes and mixes."""

from __future__ import annotations

import triton
import triton.language as tl

from leadframe_triton.kernels.tile import attend_range, store_normalised


@triton.jit
def _row_of_tile(query_start_ptr, tile, base, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """The last row whose first tile is at or before `tile`.

    Row i starts at tile (query_start[i] - base) // BLOCK_Q + (i - first_row): an upper bound of
    the tiles before it that needs no prefix sum. It leaves holes, which their programs skip.
    """
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(query_start_ptr + middle) - base) // BLOCK_Q + middle - first_row
        if begin <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _locate(query_start_ptr, tile, base, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """A tile's row, the row's first token and number of tokens, and the tile's first of them."""
    row = _row_of_tile(query_start_ptr, tile, base, first_row, num_rows, BLOCK_Q)
    begin = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - begin
    local = (tile - ((begin - base) // BLOCK_Q + row - first_row)) * BLOCK_Q
    return row, begin, count, local


@triton.jit
def _zero_tail(
    out_ptr, first, num_tokens, kv_head, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Zeroes the output of the padded tokens [first, first + BLOCK_Q) that no row owns."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    keep = (m < BLOCK_Q * GROUP) & (token < num_tokens)
    offset = token.to(tl.int64) * stride_out + (kv_head * GROUP + m % GROUP) * HEAD_DIM
    zeros = tl.zeros([BLOCK_M, BLOCK_D], dtype=out_ptr.dtype.element_ty)
    mask = keep[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(out_ptr + offset[:, None] + d[None, :], zeros, mask=mask)


_COUNTS = ["num_tokens", "num_rows", "first_row", "table_stride", "window"]
_BATCH = ["query_start_ptr", "seq_lens_ptr", "table_ptr"]


@triton.jit(do_not_specialize=_COUNTS + _BATCH)
def ragged_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, query_start_ptr, seq_lens_ptr, table_ptr,
    num_tokens, num_rows, first_row, table_stride,
    stride_q, stride_out, stride_block, stride_slot, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, num_rows); one program a tile of BLOCK_Q tokens and a KV head.

    The GROUP query heads that share a KV head are rows of the same tile, so that K and V are
    read once for all of them. Grid: (tiles, KV heads), tiles in reverse: the last tiles of a
    row see the most keys and should start first.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    base, live_end = tl.load(query_start_ptr + first_row), tl.load(query_start_ptr + num_rows)
    used = (live_end - base) // BLOCK_Q + num_rows - first_row
    if tile >= used:
        _zero_tail(
            out_ptr, live_end + (tile - used) * BLOCK_Q, num_tokens, kv_head, stride_out,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_Q,
        )  # fmt: skip
        return
    row, begin, count, local = _locate(query_start_ptr, tile, base, first_row, num_rows, BLOCK_Q)
    if local >= count:
        return
    m_index = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = local + m_index // GROUP
    token = (begin + query).to(tl.int64)
    column = (kv_head * GROUP + m_index % GROUP) * HEAD_DIM
    keep = ((m_index < BLOCK_Q * GROUP) & (query < count))[:, None] & (d[None, :] < HEAD_DIM)
    offset = (token * stride_q + column)[:, None] + d[None, :]
    q = tl.load(q_ptr + offset, mask=keep, other=0.0)
    earlier = tl.load(seq_lens_ptr + row) - count
    last = tl.minimum(earlier + local + BLOCK_Q, earlier + count)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(earlier + local - window + 1, 0)
    full_end = tl.maximum(earlier + local + 1, 0) // BLOCK_N * BLOCK_N
    acc, _, total = attend_range(
        q, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
        table_ptr + row.to(tl.int64) * table_stride,
        earlier + query, first, last, first // BLOCK_N * BLOCK_N, full_end, last,
        stride_block, stride_slot, scale, softcap, window,
        BLOCK_M, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    offset = (token * stride_out + column)[:, None] + d[None, :]
    store_normalised(out_ptr, offset, acc, total, keep)
