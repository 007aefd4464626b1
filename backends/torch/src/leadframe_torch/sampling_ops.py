"""Torch ops from logits to tokens. See `leadframe.platform.ops`.

Draws invert the CDF in vocabulary order over block sums, and top_k and top_p become one logit
threshold a row, so that no variant but "sort" sorts the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

NUM_CANDIDATES: Final = 1024
"""How many of a row's largest logits the "threshold" variant looks at."""

_BLOCK: Final = 128


def finite_rows(logits: Tensor) -> Tensor:
    """Bool [N]: whether every logit of a row [N, V] is finite."""
    return torch.isfinite(logits).all(dim=-1)


def argmax(logits: Tensor) -> Tensor:
    """int32 [N]: the first index of the largest logit of each row."""
    return logits.argmax(dim=-1).to(torch.int32)


def edit_logits(
    logits_d: Tensor, ids: Tensor, scale: Tensor, add: Tensor, keep_only: Tensor
) -> Tensor:
    """Applies penalties, biases and masks to tokens ids [N, A] of each row [N, V], in place."""
    columns = ids.long().clamp_(0, logits_d.shape[1] - 1)
    old = logits_d.gather(1, columns)
    new = torch.where(old > 0, old / scale, old * scale) + add
    logits_d.masked_fill_(keep_only.unsqueeze(1) == 1, -math.inf)
    return logits_d.scatter_(1, columns, new.to(logits_d.dtype))


def mask_logits(logits_d: Tensor, mask: Tensor) -> Tensor:
    """Sets the tokens of each row [N, V] whose bit in int32 [N, W] is set to -inf, in place."""
    parts = mask.contiguous().view(torch.uint8)  # the lowest byte of a word comes first
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (parts.unsqueeze(2) >> shifts) & 1
    is_masked = bits.view(mask.shape[0], -1)[:, : logits_d.shape[1]].bool()
    return logits_d.masked_fill_(is_masked, -math.inf)


def sample(
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    min_p: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    variant: Literal["plain", "threshold", "sort"],
) -> tuple[Tensor, Tensor]:
    """Draws one token a row of logits [N, V]; returns int32 [N] and bool [N] covered."""
    logits = logits.float()
    is_greedy = temperature <= 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    best = scaled.amax(dim=-1, keepdim=True)
    floor = best + torch.log(min_p).unsqueeze(1)  # log(0) is -inf: off
    covered = torch.ones_like(is_greedy)
    if variant != "plain":
        assert top_k is not None, "the batch lacks top_k"
        assert top_p is not None, "the batch lacks top_p"
        vocab = scaled.shape[1]
        num = vocab if variant == "sort" else min(NUM_CANDIDATES, vocab)
        candidates = torch.topk(scaled, num, dim=-1).values
        floor, covered = _thresholds(scaled, candidates, floor, top_k, top_p)
    drawn = _draw(_weights(scaled, best, floor), uniform)
    return torch.where(is_greedy, argmax(logits), drawn), covered | is_greedy


def _thresholds(
    scaled: Tensor, candidates: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Raises the floor [N, 1] for top_k and top_p.

    Args:
      scaled: logits over temperature, [N, V].
      candidates: the largest of each row, largest first, [N, C].
      floor: the smallest logit kept so far, [N, 1].
      top_k: int32 [N]; 0 is off.
      top_p: float32 [N]; 1 is off.

    Returns:
      The new floor [N, 1], and bool [N]: whether the candidates decided both.
    """
    vocab, num = scaled.shape[1], candidates.shape[1]
    last, k = candidates[:, -1:], top_k.long().unsqueeze(1)
    covered = (k <= num) | (k >= vocab) | (last < floor)
    kth = candidates.gather(1, (k - 1).clamp(0, num - 1))
    floor = torch.where((k > 0) & (k <= num), torch.maximum(floor, kth), floor)

    best, p = candidates[:, :1], top_p.unsqueeze(1)
    total = _weights(scaled, best, floor).sum(dim=-1, keepdim=True)
    mass = _weights(candidates, best, floor).cumsum(dim=-1)
    first = (mass < p * total).sum(dim=-1, keepdim=True)
    is_off, is_reached = p >= 1, first < num
    holds_all = last < floor if num < vocab else torch.ones_like(is_reached)
    covered = covered & (is_off | is_reached | holds_all)
    nucleus = torch.maximum(floor, candidates.gather(1, first.clamp(0, num - 1)))
    return torch.where(is_reached & ~is_off, nucleus, floor), covered.squeeze(1)


def _weights(x: Tensor, best: Tensor, floor: Tensor) -> Tensor:
    """exp(x - best) where x reaches the floor, 0 elsewhere."""
    return torch.where(x >= floor, torch.exp(x - best), 0.0)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """int32 [N]: the first token whose running mass exceeds uniform times the whole."""
    num_rows, vocab = weights.shape
    padding = -vocab % _BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    target = uniform.unsqueeze(1) * ends[:, -1:]
    block = _first_above(ends, sums, target)
    start = ends.gather(1, block) - sums.gather(1, block)
    index = block.unsqueeze(2).expand(num_rows, 1, _BLOCK)
    inside = blocks.gather(1, index).squeeze(1)
    offset = _first_above(inside.cumsum(dim=-1), inside, target - start)
    token = block * _BLOCK + offset
    return token.squeeze(1).clamp_(0, vocab - 1).to(torch.int32)


def _first_above(ends: Tensor, parts: Tensor, target: Tensor) -> Tensor:
    """int64 [N, 1]: the first entry whose running sum exceeds the target.

    Clamped to the last entry that is not zero: rounding may leave the whole sum at or below the
    target, and an entry of weight zero must never be drawn.
    """
    index = (ends <= target).sum(dim=-1, keepdim=True)
    places = torch.arange(parts.shape[1], device=parts.device)
    last = torch.where(parts > 0, places, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last)


def topk_logprobs(
    logits: Tensor, targets: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probability and rank of the targets [N], and the k best of each row [N, V]."""
    logits = logits.float()
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    columns = targets.long().clamp(0, logits.shape[1] - 1).unsqueeze(1)
    chosen = logits.gather(1, columns)
    rank = (1 + (logits > chosen).sum(dim=-1)).to(torch.int32)
    logprob = (chosen - norm).squeeze(1)
    if k == 0:
        return logprob, rank, None, None
    values, ids = torch.topk(logits, k, dim=-1)
    return logprob, rank, ids.to(torch.int32), values - norm


OPS: Final[dict[str, Callable[..., Any]]] = {
    op.__name__: op for op in (finite_rows, edit_logits, mask_logits, argmax, sample, topk_logprobs)
}
