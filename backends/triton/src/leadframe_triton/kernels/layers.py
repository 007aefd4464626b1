"""Row-wise kernels of a decoder layer: RMSNorm, rotary embedding, gated activations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    stride_x,
    stride_residual,
    eps,
    weight_offset,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm of BLOCK_R rows of WIDTH elements; with HAS_RESIDUAL, of x + residual.

    The sum is rounded to x's dtype before it is normalised, because that is what the next
    layer's residual stream carries.
    """
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < num_rows) & (column < WIDTH)
    row = row.to(tl.int64)
    x = tl.load(x_ptr + row * stride_x + column, mask=keep, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + column, mask=keep, other=0.0)
        total = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column, total, mask=keep)
        x = total
    x = x.to(tl.float32)
    mean = tl.sum(x * x, 1) / WIDTH
    scale = 1.0 / tl.sqrt(mean + eps)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    out = x * scale[:, None] * (weight_offset + weight)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def rope_kernel(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    stride_x,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotates dimensions i and i + HALF of each head; copies those from 2 * HALF on.

    Grid: (tokens, HEADS / BLOCK_H).
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    i = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    source = x_ptr + token * stride_x + head * HEAD_DIM
    target = out_ptr + token * (HEADS * HEAD_DIM) + head * HEAD_DIM
    keep = (head < HEADS) & (i[None, :] < HALF)
    a = tl.load(source + i[None, :], mask=keep, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + i[None, :], mask=keep, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(target + i[None, :], (a * cos - b * sin).to(dtype), mask=keep)
    tl.store(target + HALF + i[None, :], (b * cos + a * sin).to(dtype), mask=keep)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        keep = (head < HEADS) & (rest < HEAD_DIM)
        tl.store(target + rest, tl.load(source + rest, mask=keep), mask=keep)


@triton.jit
def gate_mul_kernel(
    out_ptr,
    gate_ptr,
    up_ptr,
    stride_gate,
    stride_up,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """act(gate) * up, with act SiLU or tanh-approximated GELU. Grid: (rows, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < WIDTH
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=keep, other=0.0).to(tl.float32)
    if GELU:
        # gelu(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), from tanh in terms of exp.
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        z = gate
    # exp of a negative number in both branches: it cannot overflow
    e = tl.exp(-tl.abs(z))
    out = gate * (tl.where(z >= 0.0, 1.0, e) / (1.0 + e)) * up
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=keep)
