"""Reference sampling ops.

Draws invert the CDF in vocabulary order over block sums: no sort, and near-ties between logits
do not reorder the CDF from one backend to another. top_k and top_p become one logit threshold a
row, found among the largest candidates.
"""

from __future__ import annotations

import math
from typing import Literal

from leadframe.platform.reference_ops.context import Array, Context

NUM_CANDIDATES = 1024
_BLOCK = 128


def finite_rows(c: Context, logits: Array) -> Array:
    """Bool [N]: whether every logit of a row is finite."""
    return c.xp.all(c.xp.isfinite(logits), axis=-1)


def argmax(c: Context, logits: Array) -> Array:
    """int32 [N]: the first index of the largest logit of each row."""
    return c.xp.astype(c.xp.argmax(logits, axis=-1), c.xp.int32)


def edit_logits(
    c: Context, logits_d: Array, ids: Array, scale: Array, add: Array, keep_only: Array
) -> Array:
    """Applies penalties, biases and masks to some tokens [N, A] of each row [N, V]."""
    xp = c.xp
    num_rows, num_edits = ids.shape
    ids = xp.clip(ids, 0, logits_d.shape[1] - 1)
    old = _at(c, logits_d, ids)
    new = xp.where(old > 0, old / scale, old * scale) + add
    drop = xp.full_like(logits_d, -math.inf)
    base = xp.where(keep_only[:, None] == 1, drop, logits_d)
    rows = xp.reshape(c.iota(num_rows)[:, None] + xp.zeros_like(ids), (-1,))
    flat = (xp.reshape(part, (-1,)) for part in (ids, c.as_type(new, logits_d)))
    return xp.put(base, rows, *flat) if num_edits else base


def mask_logits(c: Context, logits_d: Array, mask: Array) -> Array:
    """Sets the tokens of each row [N, V] whose bit in int32 [N, W] is set to -inf."""
    xp = c.xp
    num_rows, vocab = logits_d.shape
    bits = xp.bitwise_right_shift(mask[:, :, None], c.iota(32)[None, None, :])
    is_masked = xp.reshape(xp.bitwise_and(bits, xp.ones_like(bits)), (num_rows, -1)) == 1
    return xp.where(is_masked[:, :vocab], xp.full_like(logits_d, -math.inf), logits_d)


def sample(
    c: Context,
    logits: Array,
    temperature: Array,
    uniform: Array,
    min_p: Array,
    top_k: Array | None,
    top_p: Array | None,
    variant: Literal["plain", "threshold", "sort"],
) -> tuple[Array, Array]:
    """Draws one token a row; returns int32 [N] and bool [N] covered."""
    xp, logits = c.xp, c.up(logits)
    is_greedy = temperature <= 0
    scale = xp.where(is_greedy, xp.ones_like(temperature), temperature)
    scaled = logits / c.up(scale)[:, None]
    floor = _min_p_floor(c, scaled, c.up(min_p))
    covered = xp.ones_like(is_greedy)
    if variant != "plain":
        vocab = scaled.shape[1]
        num = vocab if variant == "sort" else min(NUM_CANDIDATES, vocab)
        candidates, _ = xp.top_k(scaled, num)
        floor, covered = _thresholds(c, scaled, candidates, floor, top_k, c.up(top_p))
    drawn = _draw(c, scaled, floor, c.up(uniform))
    return xp.where(is_greedy, argmax(c, logits), drawn), covered | is_greedy


def _min_p_floor(c: Context, scaled: Array, min_p: Array) -> Array:
    """The smallest logit [N, 1] that min_p keeps; -inf where it is off."""
    xp = c.xp
    tiny = xp.full_like(min_p, 1e-30)
    log_p = xp.log(xp.where(min_p > 0, min_p, tiny))
    log_p = xp.where(min_p > 0, log_p, xp.full_like(min_p, -math.inf))
    return xp.max(scaled, axis=-1, keepdims=True) + log_p[:, None]


def _thresholds(
    c: Context, scaled: Array, candidates: Array, floor: Array, top_k: Array, top_p: Array
) -> tuple[Array, Array]:
    """Raises the floor [N, 1] for top_k and top_p.

    Args:
      c: the array library.
      scaled: logits over temperature, [N, V].
      candidates: the largest of each row, largest first, [N, C].
      floor: the threshold so far, [N, 1].
      top_k: int32 [N]; 0 is off.
      top_p: [N]; 1 is off.

    Returns:
      The new floor [N, 1], and bool [N]: whether the candidates decided both.
    """
    xp = c.xp
    vocab, num = scaled.shape[1], candidates.shape[1]
    last = candidates[:, -1:]
    k = top_k[:, None]
    covered = (k <= num) | (k >= vocab) | (last < floor)
    kth = _at(c, candidates, xp.clip(k - 1, 0, num - 1))
    floor = xp.where((k > 0) & (k <= num), xp.maximum(floor, kth), floor)

    best = candidates[:, :1]
    total = xp.sum(_weights(c, scaled, best, floor), axis=-1, keepdims=True)
    mass = xp.cumulative_sum(_weights(c, candidates, best, floor), axis=-1)
    is_short = xp.astype(mass < top_p[:, None] * total, xp.int32)
    first = xp.sum(is_short, axis=-1, keepdims=True, dtype=xp.int32)
    is_off = top_p[:, None] >= 1
    is_reached = first < num
    holds_all = last < floor if num < vocab else xp.ones_like(is_reached)
    covered = covered & (is_off | is_reached | holds_all)
    nucleus = xp.maximum(floor, _at(c, candidates, xp.clip(first, 0, num - 1)))
    return xp.where(is_reached & ~is_off, nucleus, floor), covered[:, 0]


def _weights(c: Context, x: Array, best: Array, floor: Array) -> Array:
    """exp(x - best) where x reaches the floor, 0 elsewhere."""
    return c.xp.where(x >= floor, c.xp.exp(x - best), c.xp.zeros_like(x))


def _at(c: Context, x: Array, columns: Array) -> Array:
    """x[n, columns[n, a]] as [N, A]."""
    num_rows, width = x.shape
    flat = c.iota(num_rows)[:, None] * width + columns
    return c.take(c.xp.reshape(x, (-1,)), flat)


def _draw(c: Context, scaled: Array, floor: Array, uniform: Array) -> Array:
    """int32 [N]: the first token whose mass exceeds uniform times the mass of all kept."""
    xp = c.xp
    num_rows, vocab = scaled.shape
    weights = _weights(c, scaled, xp.max(scaled, axis=-1, keepdims=True), floor)
    num_blocks = -(-vocab // _BLOCK)
    pad = xp.zeros((num_rows, num_blocks * _BLOCK - vocab), dtype=weights.dtype)
    weights = xp.reshape(xp.concat([weights, pad], axis=1), (num_rows, num_blocks, _BLOCK))
    sums = xp.sum(weights, axis=-1)
    ends = xp.cumulative_sum(sums, axis=-1)
    target = uniform[:, None] * ends[:, -1:]
    block = _first_above(c, ends, sums, target)
    # not ends - sums: rounding could put the start above the target
    start = _at(c, ends, xp.clip(block - 1, 0, num_blocks - 1))
    start = xp.where(block > 0, start, xp.zeros_like(start))
    inside = c.take(
        xp.reshape(weights, (num_rows * num_blocks, _BLOCK)),
        c.iota(num_rows) * num_blocks + block[:, 0],
    )
    offset = _first_above(c, xp.cumulative_sum(inside, axis=-1), inside, target - start)
    return xp.clip(block[:, 0] * _BLOCK + offset[:, 0], 0, vocab - 1)


def _first_above(c: Context, ends: Array, parts: Array, target: Array) -> Array:
    """int32 [N, 1]: the first entry whose running sum exceeds the target.

    Clamped to the last entry that is not zero: rounding may leave the whole sum at or below the
    target, and an entry of weight zero must never be drawn.
    """
    xp = c.xp
    index = xp.sum(xp.astype(ends <= target, xp.int32), axis=-1, keepdims=True, dtype=xp.int32)
    places = c.iota(parts.shape[1])[None, :]
    last = xp.max(xp.where(parts > 0, places, xp.zeros_like(places)), axis=-1, keepdims=True)
    return xp.minimum(index, last)


def topk_logprobs(
    c: Context, logits: Array, targets: Array, k: int
) -> tuple[Array, Array, Array | None, Array | None]:
    """Log-probability and rank of the targets [N], and the k best of each row."""
    xp, logits = c.xp, c.up(logits)
    best = xp.max(logits, axis=-1, keepdims=True)
    norm = best + xp.log(xp.sum(xp.exp(logits - best), axis=-1, keepdims=True))
    chosen = _at(c, logits, xp.clip(targets, 0, logits.shape[1] - 1)[:, None])
    above = xp.astype(logits > chosen, xp.int32)
    rank = 1 + xp.sum(above, axis=-1, dtype=xp.int32)
    logprob = xp.astype((chosen - norm)[:, 0], xp.float32)
    if k == 0:
        return logprob, rank, None, None
    values, ids = xp.top_k(logits, k)
    return logprob, rank, ids, xp.astype(values - norm, xp.float32)
