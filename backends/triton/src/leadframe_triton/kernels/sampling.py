"""Choosing a token from a row of logits in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def argmax_kernel(out_ptr, logits_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The first index of the largest logit of each row. Grid: (rows,)."""
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    best = float("-inf")
    index = 0
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
        value, place = tl.max(x, 0, return_indices=True)
        # Strictly larger: of equal logits the first wins.
        index = tl.where(value > best, start + place, index)
        best = tl.maximum(best, value)
    tl.store(out_ptr + tl.program_id(0), index)
