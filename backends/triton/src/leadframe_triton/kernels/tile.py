"""The inner loop that every attention kernel shares: one query tile against a run of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible(position, key, window, HAS_WINDOW: tl.constexpr):
    """Whether the query at `position` sees `key` (broadcast)."""
    seen = key <= position
    if HAS_WINDOW:
        seen = seen & (key > position - window)
    return seen


@triton.jit
def _load(
    ptr, offset, keep, d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Keys or values [BLOCK_N, BLOCK_D]; zeros where they may not be read."""
    if MASKED:
        x = tl.load(ptr + offset, mask=keep, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        x = tl.load(ptr + offset, mask=d[None, :] < HEAD_DIM, other=0.0)
    else:
        x = tl.load(ptr + offset)
    return x


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled and capped scores [BLOCK_M, BLOCK_N], times log2(e)."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    # What does not change from score to score is multiplied first, and so outside of the loop.
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), with exp in base 2; 2.885390... = 2 log2(e).
        doubled = tl.exp2(scores * (scale / softcap * 2.8853900817779268))
        capped = 1.0 - 2.0 / (doubled + 1)
        return capped * (softcap * 1.4426950408889634)
    return scores * (scale * 1.4426950408889634)


@triton.jit
def attend(
    acc, m, total, q, k_ptr, v_ptr, table_ptr, position, first, last, start, end,
    stride_block, stride_slot, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Folds keys [start, end) into the online softmax of one tile.

    acc [M, BLOCK_D], m [M] and total [M] are float32, m in base-2 logarithms. Keys outside
    [first, last) are not read: a NaN there would survive the masking of scores. With MASKED
    False, the caller promises that every query of the tile sees every key.
    """
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(start, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        inside = (key >= first) & (key < last)
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        row = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_slot
        offset = row[:, None] + d[None, :]
        keep = inside[:, None] & (d[None, :] < HEAD_DIM)
        k = _load(k_ptr, offset, keep, d, HEAD_DIM, BLOCK_D, MASKED)
        scores = _scores(q, k, scale, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = visible(position[:, None], key[None, :], window, HAS_WINDOW)
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = m_new
        if MASKED:
            # A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN.
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        v = _load(v_ptr, offset, keep, d, HEAD_DIM, BLOCK_D, MASKED)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit
def attend_range(
    q, k_ptr, v_ptr, table_ptr, position, first, last, start, full_end, end,
    stride_block, stride_slot, scale, softcap, window,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Runs `attend` over [start, end): unmasked up to `full_end`, masked after it.

    With a window both ends of the run need masks and the run is short, so that one masked loop
    does it all. `start` and `full_end` are multiples of BLOCK_N.

    Returns:
      acc [BLOCK_M, BLOCK_D], m [BLOCK_M], total [BLOCK_M], float32 and not normalised.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    rest = start
    if not HAS_WINDOW:
        acc, m, total = attend(
            acc, m, total, q, k_ptr, v_ptr, table_ptr, position, first, last, start, full_end,
            stride_block, stride_slot, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        rest = tl.maximum(start, full_end)
    return attend(
        acc, m, total, q, k_ptr, v_ptr, table_ptr, position, first, last, rest, end,
        stride_block, stride_slot, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip


@triton.jit
def store_normalised(out_ptr, offset, acc, total, keep):
    """Stores acc / total; rows that have seen nothing, padding, become zeros."""
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=keep)
