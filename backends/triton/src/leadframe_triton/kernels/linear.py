"""A matrix product whose rows do not depend on how many there are.

Vendor libraries pick a kernel by the number of rows, and with it the order of the sum. This one
always walks K in the same steps with the same tile, so that a row's bits depend on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    stride_x,
    stride_weight,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Out [rows, OUT] = x [rows, IN] @ weight [OUT, IN]^T + bias. Grid: (OUT, rows) in tiles."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + m.to(tl.int64)[:, None] * stride_x
    w_row = weight_ptr + n.to(tl.int64)[:, None] * stride_weight
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, IN, BLOCK_K):
        column = start + k[None, :]
        x_keep = m[:, None] < num_rows
        w_keep = n[:, None] < OUT
        if IN % BLOCK_K != 0:
            x_keep = x_keep & (column < IN)
            w_keep = w_keep & (column < IN)
        x = tl.load(x_row + column, mask=x_keep, other=0.0)
        w = tl.load(w_row + column, mask=w_keep, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < OUT, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    keep = (m[:, None] < num_rows) & (n[None, :] < OUT)
    target = out_ptr + m.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=keep)
