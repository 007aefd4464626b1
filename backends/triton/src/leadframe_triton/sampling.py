"""Launches of the sampling kernels, with the signatures of `leadframe.platform.ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from leadframe_triton.kernels import sampling as kernels
from leadframe_triton.launch import LaunchContext, ceil_div, power_of_two

NUM_CANDIDATES: Final = 1024
"""How many of a row's largest logits the "threshold" variant looks at."""

_CHUNK: Final = 4096
_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class _Rows:
    """Logits as the kernels see them.

    Attributes:
      logits: [N, V] with unit stride along the vocabulary.
      block: tokens a chunk.
      chunks: chunks a row.
      options: launch options.
    """

    logits: Tensor
    block: int
    chunks: int
    options: dict[str, int]

    @staticmethod
    def of(c: LaunchContext, logits: Tensor) -> _Rows:
        """Cuts logits into chunks."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        block = min(power_of_two(logits.shape[1]), _CHUNK)
        return _Rows(logits, block, ceil_div(logits.shape[1], block), c.options(_WARPS))

    @property
    def count(self) -> int:
        """N."""
        return int(self.logits.shape[0])

    @property
    def sizes(self) -> dict[str, Any]:
        """What programs of (row, chunk) are launched with."""
        return {"VOCAB": self.logits.shape[1], "BLOCK": self.block, **self.options}

    @property
    def joined(self) -> dict[str, Any]:
        """What programs of (row) need to read the chunks."""
        return {"CHUNKS": self.chunks, "BLOCK_C": power_of_two(self.chunks), **self.options}

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory next to the logits, [N, *shape]."""
        return torch.empty((self.count, *shape), dtype=dtype, device=self.logits.device)

    def best(self) -> tuple[Tensor, Tensor]:
        """The largest logit of each chunk and its first index."""
        best, index = self.empty(self.chunks), self.empty(self.chunks, dtype=torch.int32)
        kernels.chunk_best_kernel[(self.count, self.chunks)](
            best, index, self.logits, self.logits.stride(0), **self.sizes
        )
        return best, index


def argmax(c: LaunchContext, logits: Tensor) -> Tensor:
    """int32 [N]: the first index of the largest logit of each row [N, V]."""
    rows = _Rows.of(c, logits)
    out = rows.empty(dtype=torch.int32)
    kernels.argmax_kernel[(rows.count,)](out, *rows.best(), **rows.joined)
    return out


def sample(
    c: LaunchContext,
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    min_p: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    variant: Literal["plain", "threshold", "sort"],
) -> tuple[Tensor, Tensor]:
    """Draws one token a row of logits [N, V]; returns int32 [N] and bool [N] covered."""
    rows = _Rows.of(c, logits)
    vocab = rows.logits.shape[1]
    num = {"plain": 0, "threshold": min(NUM_CANDIDATES, vocab), "sort": vocab}[variant]
    # Largest first; as a set of values they do not depend on how ties are ordered.
    candidates = torch.topk(rows.logits, num).values.contiguous() if num else rows.logits
    token, covered = rows.empty(dtype=torch.int32), rows.empty(dtype=torch.bool)
    top, floor = rows.empty(), rows.empty()
    kernels.floor_kernel[(rows.count,)](
        token,
        top,
        floor,
        *rows.best(),
        candidates,
        temperature,
        min_p,
        min_p if top_k is None else top_k,
        NUM=num,
        **rows.joined,
    )
    mass = _mass(rows, top, floor, temperature)
    if num:
        limits = (floor, covered, mass, top, candidates, temperature, top_k, top_p)
        block = min(power_of_two(num), NUM_CANDIDATES)
        kernels.nucleus_kernel[(rows.count,)](
            *limits, VOCAB=vocab, NUM=num, BLOCK=block, **rows.joined
        )
        mass = _mass(rows, top, floor, temperature)
    drawn = (token, covered, rows.logits, mass, top, floor, temperature, uniform)
    kernels.draw_kernel[(rows.count,)](
        *drawn, rows.logits.stride(0), IS_PLAIN=not num, **{**rows.sizes, **rows.joined}
    )
    return token, covered


def _mass(rows: _Rows, top: Tensor, floor: Tensor, temperature: Tensor) -> Tensor:
    """The weight of the kept tokens of each chunk."""
    mass = rows.empty(rows.chunks)
    kernels.chunk_mass_kernel[(rows.count, rows.chunks)](
        mass, rows.logits, top, floor, temperature, rows.logits.stride(0), **rows.sizes
    )
    return mass


def topk_logprobs(
    c: LaunchContext, logits: Tensor, targets: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability and rank of the targets [N], and the k best of each row [N, V]."""
    rows = _Rows.of(c, logits)
    best, total = rows.empty(rows.chunks), rows.empty(rows.chunks)
    above = rows.empty(rows.chunks, dtype=torch.int32)
    kernels.chunk_logprob_kernel[(rows.count, rows.chunks)](
        best, total, above, rows.logits, targets, rows.logits.stride(0), **rows.sizes
    )
    logprob, norm, rank = rows.empty(), rows.empty(), rows.empty(dtype=torch.int32)
    kernels.logprob_kernel[(rows.count,)](
        logprob,
        rank,
        norm,
        best,
        total,
        above,
        rows.logits,
        targets,
        rows.logits.stride(0),
        VOCAB=rows.logits.shape[1],
        **rows.joined,
    )
    if k == 0:
        return logprob, rank, None, None
    values, ids = torch.topk(rows.logits, k)
    return logprob, rank, ids.to(torch.int32), values.float() - norm.unsqueeze(1)
