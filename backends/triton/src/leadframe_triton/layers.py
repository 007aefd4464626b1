"""Launches of the layer kernels, with the signatures of `leadframe.platform.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from leadframe_triton.kernels.layers import gate_mul_kernel, rms_norm_kernel, rope_kernel
from leadframe_triton.launch import LaunchContext, ceil_div, power_of_two

_TILE_ELEMENTS = 1024
_INTERPRETED_ROWS = 64
"""The interpreter pays for every program, so that one takes many rows."""


def rms_norm(
    c: LaunchContext, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> Tensor:
    """RMSNorm over the last axis of x, any leading axes."""
    return _norm(c, x, None, weight, eps, offset)[0]


def add_rms_norm(
    c: LaunchContext,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual)."""
    return _norm(c, x, residual, weight, eps, offset)


def _norm(
    c: LaunchContext,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    flat = _rows(x)
    other = flat if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = power_of_two(width)
    block_r = _rows_per_program(c, block)
    rms_norm_kernel[(ceil_div(rows, block_r),)](
        out,
        total,
        flat,
        other,
        weight,
        rows,
        flat.stride(0),
        other.stride(0),
        float(eps),
        float(offset),
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        BLOCK_R=block_r,
        BLOCK=block,
        **c.options(c.warps(block * block_r)),
    )
    return out, total


def rope(c: LaunchContext, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first R dimensions of each head of x [T, H, D]; table is [T, R / 2] each."""
    cos, sin = (part.contiguous() for part in table)
    num_tokens, heads, dim = x.shape
    half = cos.shape[1]
    x = x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(half)
    block_h = min(power_of_two(heads), max(1, _TILE_ELEMENTS // block))
    rope_kernel[(num_tokens, ceil_div(heads, block_h))](
        out,
        x,
        cos,
        sin,
        x.stride(0),
        HEADS=heads,
        HEAD_DIM=dim,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK=block,
        BLOCK_REST=power_of_two(dim - 2 * half) if dim > 2 * half else 0,
        **c.options(c.warps(2 * block * block_h)),
    )
    return out


def silu_mul(c: LaunchContext, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _gate(c, gate, up, gelu=False)


def gelu_mul(c: LaunchContext, gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation."""
    return _gate(c, gate, up, gelu=True)


def _gate(c: LaunchContext, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = _rows(gate), _rows(up)
    block = min(power_of_two(width), _TILE_ELEMENTS)
    gate_mul_kernel[(gate.shape[0], ceil_div(width, block))](
        out,
        gate,
        up,
        gate.stride(0),
        up.stride(0),
        WIDTH=width,
        GELU=gelu,
        BLOCK=block,
        **c.options(c.warps(block)),
    )
    return out


def _rows_per_program(c: LaunchContext, block: int) -> int:
    if c.arch.vendor == "none":
        return _INTERPRETED_ROWS
    return max(1, _TILE_ELEMENTS // block)


def _rows(x: Tensor) -> Tensor:
    """X as [rows, width] with unit stride along the width, without a copy where possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
