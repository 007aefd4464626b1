"""Attention over the reference KV layout, [num_blocks, block_size, 2 * kv_heads, head_dim]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform import AttnParams, StepArrays

Array = npt.NDArray[Any]


def attention(q: Array, kv: Array, plan: StepArrays, params: AttnParams) -> Array:
    """Causal attention of q [T, H, D], row by row."""
    out = np.zeros_like(q)
    decodes = plan.bucket.num_decodes
    for row in np.flatnonzero(plan.seq_lens):
        first, last = (row, row + 1) if row < decodes else plan.query_start[row : row + 2]
        if last > first:
            length = int(plan.seq_lens[row])
            blocks = plan.block_table[row, : -(-length // kv.shape[1])]
            out[first:last] = _row(q[first:last], kv[blocks], length, params)
    return out


def _row(q: Array, blocks: Array, length: int, params: AttnParams) -> Array:
    num_q, heads, dim = q.shape
    oldest = 0 if params.window is None else max(0, length - num_q - params.window + 1)
    rows = blocks.reshape(-1, *blocks.shape[2:])[oldest:length]
    kv_heads = rows.shape[1] // 2
    k, v = rows[:, :kv_heads], rows[:, kv_heads:]
    q = q.reshape(num_q, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    scores = q @ k.transpose(1, 2, 0)[:, None] * params.scale
    ahead = np.arange(oldest, length) - np.arange(length - num_q, length)[:, None]
    hidden = ahead > 0 if params.window is None else (ahead > 0) | (ahead <= -params.window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v.transpose(1, 0, 2)[:, None]
    return np.asarray(out.transpose(2, 0, 1, 3).reshape(num_q, heads, dim))
