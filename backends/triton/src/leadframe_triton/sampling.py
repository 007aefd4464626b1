"""Launches of the sampling kernels, with the signatures of `leadframe.platform.ops`."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from leadframe_triton.kernels.sampling import argmax_kernel, logprob_kernel, sample_kernel
from leadframe_triton.launch import LaunchContext, power_of_two

NUM_CANDIDATES: Final = 1024
"""How many of a row's largest logits the "threshold" variant looks at."""

_BLOCK: Final = 4096


def argmax(c: LaunchContext, logits: Tensor) -> Tensor:
    """int32 [N]: the first index of the largest logit of each row [N, V]."""
    logits = _unit_stride(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block = _block(vocab)
    argmax_kernel[(rows,)](
        out, logits, logits.stride(0), VOCAB=vocab, BLOCK=block, **c.options(c.warps(block))
    )
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
    logits = _unit_stride(logits)
    rows, vocab = logits.shape
    num = {"plain": 0, "threshold": min(NUM_CANDIDATES, vocab), "sort": vocab}[variant]
    # Largest first; as a set of values they do not depend on how ties are ordered.
    candidates = torch.topk(logits, num, dim=-1).values.contiguous() if num else logits
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    covered = torch.empty(rows, dtype=torch.bool, device=logits.device)
    block = _block(vocab)
    sample_kernel[(rows,)](
        token,
        covered,
        logits,
        candidates,
        temperature,
        uniform,
        min_p,
        temperature if top_k is None else top_k,
        temperature if top_p is None else top_p,
        logits.stride(0),
        VOCAB=vocab,
        NUM=num,
        BLOCK=block,
        BLOCK_C=min(_block(num or 1), NUM_CANDIDATES),
        **c.options(c.warps(block)),
    )
    return token, covered


def topk_logprobs(
    c: LaunchContext, logits: Tensor, targets: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability and rank of the targets [N], and the k best of each row [N, V]."""
    logits = _unit_stride(logits)
    rows, vocab = logits.shape
    logprob, norm = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    rank = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block = _block(vocab)
    logprob_kernel[(rows,)](
        logprob,
        rank,
        norm,
        logits,
        targets,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=block,
        **c.options(c.warps(block)),
    )
    if k == 0:
        return logprob, rank, None, None
    values, ids = torch.topk(logits, k, dim=-1)
    return logprob, rank, ids.to(torch.int32), values.float() - norm.unsqueeze(1)


def _block(vocab: int) -> int:
    return min(power_of_two(vocab), _BLOCK)


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
