"""Ragged batches over a shuffled cache, and float64 attention over them, written out in torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from leadframe.platform.batch import Bucket, StepArrays


@dataclass
class Problem:
    """One attention call.

    rows holds (new tokens, context) of each row, decodes first; (1, 0) is a padded decode and
    (0, 0) a padded chunk.
    """

    arrays: StepArrays
    rows: list[tuple[int, int]]
    q: torch.Tensor
    kv: torch.Tensor

    @property
    def live(self):
        """The tokens that belong to a row with keys."""
        starts = self.arrays.query_start.tolist()
        return [s + j for s, (n, ctx) in zip(starts, self.rows, strict=False) for j in range(n if ctx else 0)]  # fmt: skip  # noqa: E501


def make(
    decodes=(),
    chunks=(),
    *,
    pad_decodes=0,
    pad_chunks=0,
    pad_tokens=0,
    width=None,
    block_size=16,
    heads=(2, 1),
    dim=64,
    dtype=torch.float32,
    kv_dtype=None,
    fill=float("nan"),
    seed=0,
):
    """Builds a problem; every slot that no row owns holds `fill`."""
    rows = [(1, ctx) for ctx in decodes] + [(1, 0)] * pad_decodes
    num_decodes = len(rows)
    rows += [*chunks, *[(0, 0)] * pad_chunks]
    needed = [-(-ctx // block_size) for _, ctx in rows]
    width = width or max(needed)
    num_blocks = sum(needed) + 2
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(1, num_blocks))
    table = np.zeros((len(rows), width), np.int32)
    used = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[used : used + count]
        used += count
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])])
    num_tokens = int(starts[-1]) + pad_tokens
    slots, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    for row, (count, ctx) in enumerate(rows):
        for j in range(count if ctx else 0):
            position = ctx - count + j
            token = starts[row] + j
            slots[token] = table[row, position // block_size] * block_size + position % block_size
            positions[token] = position
    bucket = Bucket(num_tokens, len(rows), num_decodes, width, 0, "skip")
    lens = np.array([ctx for _, ctx in rows])
    empty = np.zeros(0)
    arrays = [starts, lens, table, slots, positions, np.zeros(num_tokens), empty]
    tensors = [torch.from_numpy(np.ascontiguousarray(a).astype(np.int32)) for a in arrays]

    kv_heads, group = heads
    generator = torch.Generator().manual_seed(seed)
    kv = torch.full((2, num_blocks, block_size, kv_heads, dim), fill)
    for row, (_, ctx) in enumerate(rows):
        for position in range(ctx):
            block = table[row, position // block_size]
            kv[:, block, position % block_size] = torch.randn(
                (2, kv_heads, dim), generator=generator
            )
    q = torch.randn((num_tokens, kv_heads * group, dim), generator=generator).to(dtype)
    return Problem(StepArrays(bucket, *tensors), rows, q, kv.to(kv_dtype or dtype))


def oracle(problem, params):
    """Attention in float64, one query at a time."""
    q, kv = problem.q.double(), problem.kv
    out = torch.zeros_like(q)
    block_size, group = kv.shape[2], q.shape[1] // kv.shape[3]
    for row, (count, ctx) in enumerate(problem.rows):
        blocks = problem.arrays.block_table[row].long()
        keys, values = (
            side[blocks].flatten(0, 1)[:ctx].double().repeat_interleave(group, 1) for side in kv
        )
        for j in range(count if ctx else 0):
            token, position = int(problem.arrays.query_start[row]) + j, ctx - count + j
            first = max(0, position + 1 - (params.window or ctx))
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,nhd->hn", q[token], keys[seen]) * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values[seen])
    assert block_size == problem.kv.shape[2]
    return out
