"""Launches of the batch-invariant product as `leadframe.platform.ops` has it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from leadframe_triton.kernels.linear import linear_kernel
from leadframe_triton.launch import LaunchContext, ceil_div

LinearTile = tuple[int, int, int, int, int]
"""(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages)."""

_HALF: Final[dict[str, LinearTile]] = {
    "ampere": (64, 128, 64, 4, 3),
    "ada": (64, 64, 64, 4, 3),
    "hopper": (64, 128, 64, 4, 4),
    "blackwell": (64, 128, 64, 4, 4),
    "cdna": (64, 64, 64, 4, 2),
    "cdna4": (64, 128, 64, 4, 2),
    "rdna": (64, 64, 32, 4, 1),
    "interpreter": (64, 128, 128, 4, 1),
}
_WIDE: Final[LinearTile] = (32, 64, 32, 4, 2)


def linear_tile(c: LaunchContext, element_bytes: int) -> LinearTile:
    """The one tile of `linear` on a chip: a choice by size would undo its purpose."""
    is_wide = element_bytes > 2 and c.arch.vendor != "none"
    return _WIDE if is_wide else _HALF[c.arch.family]


def linear(c: LaunchContext, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [T, in] times weight [out, in] transposed, plus bias [out], row by row the same bits."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    num_out = weight.shape[0]
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    block_m, block_n, block_k, warps, stages = linear_tile(c, x.element_size())
    linear_kernel[(ceil_div(num_out, block_n), ceil_div(rows, block_m))](
        out,
        x,
        weight,
        weight if bias is None else bias,
        rows,
        x.stride(0),
        weight.stride(0),
        IN=width,
        OUT=num_out,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **c.options(warps, stages),
    )
    return out
