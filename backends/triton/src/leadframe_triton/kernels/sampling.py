"""From a row of logits to a token or a log-probability, one program a row.

A program walks its row in the same steps whatever the batch: the result of a row has the same
bits alone and among others, which torch's scans and reductions do not promise.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scaled(row, start, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [start, start + BLOCK) divided by the temperature; -inf past the end."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    return x / scale


@triton.jit
def _weights(x, best, floor):
    return tl.where(x >= floor, tl.exp(x - best), 0.0)


@triton.jit
def _best(row, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest entry and its first index."""
    best = float("-inf")
    index = 0
    for start in range(0, VOCAB, BLOCK):
        value, place = tl.max(_scaled(row, start, scale, VOCAB, BLOCK), 0, return_indices=True)
        # Strictly larger: of equal logits the first wins.
        index = tl.where(value > best, start + place, index)
        best = tl.maximum(best, value)
    return best, index


@triton.jit
def _mass(row, scale, best, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of all kept tokens."""
    total = 0.0
    for start in range(0, VOCAB, BLOCK):
        x = _scaled(row, start, scale, VOCAB, BLOCK)
        total += tl.sum(_weights(x, best, floor), 0)
    return total


@triton.jit
def argmax_kernel(out_ptr, logits_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The first index of the largest logit of each row. Grid: (rows,)."""
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    _, index = _best(row, 1.0, VOCAB, BLOCK)
    tl.store(out_ptr + tl.program_id(0), index)


@triton.jit
def _nucleus(candidates, scale, best, floor, top_p, total, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates, largest first, leave less than top_p of the mass."""
    running = 0.0
    first = 0
    for start in range(0, NUM, BLOCK):
        x = _scaled(candidates, start, scale, NUM, BLOCK)
        mass = running + tl.cumsum(_weights(x, best, floor), 0)
        is_short = (mass < top_p * total) & (start + tl.arange(0, BLOCK) < NUM)
        first += tl.sum(is_short.to(tl.int32), 0)
        running = tl.max(mass, 0)
    return first


@triton.jit
def _threshold(
    row, candidates, scale, best, floor, top_k, top_p,
    VOCAB: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raises the floor for top_k and top_p; also whether the candidates decided both."""
    last = tl.load(candidates + NUM - 1).to(tl.float32) / scale
    covered = (top_k <= NUM) | (top_k >= VOCAB) | (last < floor)
    place = tl.minimum(tl.maximum(top_k - 1, 0), NUM - 1)
    kth = tl.load(candidates + place).to(tl.float32) / scale
    floor = tl.where((top_k > 0) & (top_k <= NUM), tl.maximum(floor, kth), floor)
    is_off = top_p >= 1.0
    total = _mass(row, scale, best, floor, VOCAB, BLOCK)
    first = _nucleus(candidates, scale, best, floor, top_p, total, NUM, BLOCK_C)
    is_reached = first < NUM
    holds_all = (last < floor) | (NUM == VOCAB)
    edge = tl.load(candidates + tl.minimum(first, NUM - 1)).to(tl.float32) / scale
    floor = tl.where(is_reached & (is_off == 0), tl.maximum(floor, edge), floor)
    return floor, covered & (is_off | is_reached | holds_all)


@triton.jit
def _draw(row, scale, best, floor, uniform, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The first kept token whose running mass exceeds uniform times the whole.

    Rounding may leave the whole at or below the target; then it is the last kept token, never
    one that was dropped.
    """
    target = uniform * _mass(row, scale, best, floor, VOCAB, BLOCK)
    running = 0.0
    token = -1
    last = 0
    for start in range(0, VOCAB, BLOCK):
        weight = _weights(_scaled(row, start, scale, VOCAB, BLOCK), best, floor)
        column = start + tl.arange(0, BLOCK)
        mass = running + tl.cumsum(weight, 0)
        hit = tl.min(tl.where((mass > target) & (weight > 0.0), column, VOCAB), 0)
        token = tl.where((token < 0) & (hit < VOCAB), hit, token)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, 0), 0))
        running += tl.sum(weight, 0)
    return tl.where(token < 0, last, token)


@triton.jit(
    do_not_specialize=["temperature_ptr", "uniform_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr"]
)
def sample_kernel(
    token_ptr,
    covered_ptr,
    logits_ptr,
    candidates_ptr,
    temperature_ptr,
    uniform_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    stride,
    VOCAB: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One draw a row by inverting the CDF in vocabulary order. Grid: (rows,).

    candidates [rows, NUM] are a row's largest logits, largest first; NUM 0 leaves top_k and
    top_p out ("plain").
    """
    n = tl.program_id(0)
    row = logits_ptr + n.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + n)
    scale = tl.where(temperature > 0.0, temperature, 1.0)
    best, index = _best(row, scale, VOCAB, BLOCK)
    min_p = tl.load(min_p_ptr + n)
    log_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    floor = best + log_p
    covered = True
    if NUM > 0:
        floor, covered = _threshold(
            row, candidates_ptr + n.to(tl.int64) * NUM, scale, best, floor,
            tl.load(top_k_ptr + n), tl.load(top_p_ptr + n), VOCAB, NUM, BLOCK, BLOCK_C,
        )  # fmt: skip
    token = _draw(row, scale, best, floor, tl.load(uniform_ptr + n), VOCAB, BLOCK)
    is_greedy = temperature <= 0.0
    tl.store(token_ptr + n, tl.where(is_greedy, index, token))
    tl.store(covered_ptr + n, covered | is_greedy)


@triton.jit(do_not_specialize=["targets_ptr"])
def logprob_kernel(
    logprob_ptr,
    rank_ptr,
    norm_ptr,
    logits_ptr,
    targets_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probability and rank of a target, and log of the normaliser. Grid: (rows,)."""
    n = tl.program_id(0)
    row = logits_ptr + n.to(tl.int64) * stride
    target = tl.minimum(tl.maximum(tl.load(targets_ptr + n), 0), VOCAB - 1)
    chosen = tl.load(row + target).to(tl.float32)
    best, _ = _best(row, 1.0, VOCAB, BLOCK)
    total = 0.0
    rank = 1
    for start in range(0, VOCAB, BLOCK):
        x = _scaled(row, start, 1.0, VOCAB, BLOCK)
        total += tl.sum(tl.exp(x - best), 0)
        rank += tl.sum((x > chosen).to(tl.int32), 0)
    norm = best + tl.log(total)
    tl.store(norm_ptr + n, norm)
    tl.store(logprob_ptr + n, chosen - norm)
    tl.store(rank_ptr + n, rank)
