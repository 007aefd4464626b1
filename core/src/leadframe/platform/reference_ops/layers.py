"""Reference layer ops: everything between the embedding and the logits but attention."""

from __future__ import annotations

import math

from leadframe.platform.reference_ops.context import Array, Context


def embed(c: Context, table: Array, token_ids: Array) -> Array:
    """Rows of table [V, E]; ids outside are clamped."""
    return c.xp.take(table, c.xp.clip(token_ids, 0, table.shape[0] - 1), axis=0)


def take_rows(c: Context, x: Array, rows: Array) -> Array:
    """Rows of x [T, E]."""
    return c.xp.take(x, rows, axis=0)


def linear(c: Context, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """X [T, in] times weight [out, in] transposed, plus bias."""
    out = c.xp.matmul(c.up(x), c.xp.matrix_transpose(c.up(weight)))
    if bias is not None:
        out = out + c.up(bias)
    return c.as_type(out, x)


def rms_norm(c: Context, x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """Root-mean-square norm over the last axis."""
    xp, wide = c.xp, c.up(x)
    mean = xp.mean(wide * wide, axis=-1, keepdims=True)
    return c.as_type(wide / xp.sqrt(mean + eps) * (c.up(weight) + offset), x)


def add_rms_norm(
    c: Context, x: Array, residual: Array, weight: Array, eps: float, offset: float = 0.0
) -> tuple[Array, Array]:
    """Returns (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(c, total, weight, eps, offset), total


def rope_table(
    c: Context, positions: Array, inv_freq: Array, scaling: float = 1.0
) -> tuple[Array, Array]:
    """Cos and sin [T, R/2]."""
    angles = c.up(positions)[:, None] * c.up(inv_freq)[None, :]
    return c.xp.cos(angles) * scaling, c.xp.sin(angles) * scaling


def rope(c: Context, x: Array, table: tuple[Array, Array]) -> Array:
    """Rotates the first R dimensions of each head of x [T, H, D]."""
    cos, sin = (c.up(part)[:, None, :] for part in table)
    half = cos.shape[-1]
    wide = c.up(x)
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    parts = [low * cos - high * sin, high * cos + low * sin, rest]
    return c.as_type(c.xp.concat(parts, axis=-1), x)


def silu_mul(c: Context, gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    wide = c.up(gate)
    # the tanh form of the sigmoid: exp(-x) overflows for large negative x
    return c.as_type(wide * (0.5 * c.xp.tanh(wide * 0.5) + 0.5) * c.up(up), gate)


def gelu_mul(c: Context, gate: Array, up: Array) -> Array:
    """gelu(gate) * up, with the tanh approximation."""
    wide = c.up(gate)
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return c.as_type(0.5 * wide * (1.0 + c.xp.tanh(inner)) * c.up(up), gate)


def softcap(c: Context, x: Array, cap: float) -> Array:
    """Cap * tanh(x / cap)."""
    return c.as_type(cap * c.xp.tanh(c.up(x) / cap), x)


def all_reduce(c: Context, x: Array) -> Array:
    """The identity: references run on one rank."""
    return x


def all_gather(c: Context, x: Array) -> Array:
    """The identity: references run on one rank."""
    return x
