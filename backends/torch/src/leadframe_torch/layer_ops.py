"""Torch ops between the embedding and the logits, attention aside. See `leadframe.platform.ops`.

They hold no state and work on any torch device. None of them reads a tensor's value on the host,
so each may be captured in a graph or traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of table [V, E] at int32 [T]; ids outside are clamped."""
    return F.embedding(token_ids.clamp(0, table.shape[0] - 1), table)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [T, E] at int32 [N]."""
    return x.index_select(0, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [T, in] times weight [out, in] transposed, plus bias [out]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last axis, in float32."""
    wide = x.float()
    scale = weight.float() + offset if offset else weight.float()
    return F.rms_norm(wide, (x.shape[-1],), scale, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def rope_table(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cos and sin of positions int32 [T] times inv_freq [R/2], each float32 [T, R/2]."""
    angles = torch.outer(positions.float(), inv_freq.float())
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first R dimensions of each head of x [T, H, D]; i pairs with i + R/2."""
    cos, sin = (part.unsqueeze(1) for part in table)
    half = cos.shape[-1]
    wide = x.float()
    low, high = wide[..., :half], wide[..., half : 2 * half]
    parts = [low * cos - high * sin, high * cos + low * sin]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in float32."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation, in float32."""
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Cap * tanh(x / cap), in float32."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


def all_reduce(x: Tensor) -> Tensor:
    """The identity: one rank."""
    return x


def all_gather(x: Tensor) -> Tensor:
    """The identity: one rank."""
    return x


OPS: Final[dict[str, Callable[..., Any]]] = {
    op.__name__: op
    for op in (
        embed,
        take_rows,
        linear,
        rms_norm,
        add_rms_norm,
        rope_table,
        rope,
        silu_mul,
        gelu_mul,
        softcap,
        all_reduce,
        all_gather,
    )
}
