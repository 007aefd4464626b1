"""From rows of logits to tokens and log-probabilities, over chunks of the vocabulary.

Programs of (row, chunk) reduce their part and programs of (row) put the parts together, always in
the same order: a row's result has the same bits alone and among others, which torch's scans and
reductions do not promise, and a single row still fills the device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chunk(logits_ptr, stride, scale, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """This program's logits over the temperature, -inf past the end."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    x = tl.load(row + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    return x / scale


@triton.jit
def _scale(temperature_ptr, n):
    temperature = tl.load(temperature_ptr + n)
    return tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _weights(x, best, floor):
    return tl.where(x >= floor, tl.exp(x - best), 0.0)


@triton.jit
def _parts(part_ptr, other, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The parts [CHUNKS] of this program's row, padded with `other`."""
    c = tl.arange(0, BLOCK_C)
    return tl.load(part_ptr + tl.program_id(0) * CHUNKS + c, mask=c < CHUNKS, other=other)


@triton.jit
def chunk_best_kernel(
    best_ptr, index_ptr, logits_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest logit of each chunk and its first index. Grid: (rows, chunks)."""
    x = _chunk(logits_ptr, stride, 1.0, VOCAB, BLOCK)
    value, place = tl.max(x, 0, return_indices=True)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + part, value)
    tl.store(index_ptr + part, tl.program_id(1) * BLOCK + place)


@triton.jit
def _first_best(best_ptr, index_ptr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The largest logit of this program's row and its first index."""
    best = _parts(best_ptr, float("-inf"), CHUNKS, BLOCK_C)
    value, place = tl.max(best, 0, return_indices=True)
    return value, tl.load(index_ptr + tl.program_id(0) * CHUNKS + place)


@triton.jit
def argmax_kernel(out_ptr, best_ptr, index_ptr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The first index of the largest logit of each row, from its chunks. Grid: (rows,)."""
    _, index = _first_best(best_ptr, index_ptr, CHUNKS, BLOCK_C)
    tl.store(out_ptr + tl.program_id(0), index)


@triton.jit(do_not_specialize=["temperature_ptr", "min_p_ptr", "top_k_ptr"])
def floor_kernel(
    token_ptr,
    top_ptr,
    floor_ptr,
    best_ptr,
    index_ptr,
    candidates_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    NUM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The argmax, the largest scaled logit, and the smallest that min_p and top_k keep.

    Grid: (rows,). candidates [rows, NUM] are a row's largest logits, largest first; with NUM 0
    there is no top_k.
    """
    n = tl.program_id(0)
    scale = _scale(temperature_ptr, n)
    best, index = _first_best(best_ptr, index_ptr, CHUNKS, BLOCK_C)
    best = best / scale
    min_p = tl.load(min_p_ptr + n)
    log_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    floor = best + log_p
    if NUM > 0:
        k = tl.load(top_k_ptr + n)
        place = tl.minimum(tl.maximum(k - 1, 0), NUM - 1)
        kth = tl.load(candidates_ptr + n.to(tl.int64) * NUM + place).to(tl.float32) / scale
        floor = tl.where((k > 0) & (k <= NUM), tl.maximum(floor, kth), floor)
    tl.store(token_ptr + n, index)
    tl.store(top_ptr + n, best)
    tl.store(floor_ptr + n, floor)


@triton.jit(do_not_specialize=["temperature_ptr"])
def chunk_mass_kernel(
    mass_ptr,
    logits_ptr,
    top_ptr,
    floor_ptr,
    temperature_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weight of the kept tokens of each chunk. Grid: (rows, chunks)."""
    n = tl.program_id(0)
    x = _chunk(logits_ptr, stride, _scale(temperature_ptr, n), VOCAB, BLOCK)
    weight = _weights(x, tl.load(top_ptr + n), tl.load(floor_ptr + n))
    tl.store(mass_ptr + n * tl.num_programs(1) + tl.program_id(1), tl.sum(weight, 0))


@triton.jit(do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def nucleus_kernel(
    floor_ptr,
    covered_ptr,
    mass_ptr,
    top_ptr,
    candidates_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    VOCAB: tl.constexpr,
    NUM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raises the floor for top_p, and says whether the candidates decided. Grid: (rows,)."""
    n = tl.program_id(0)
    scale = _scale(temperature_ptr, n)
    best, floor = tl.load(top_ptr + n), tl.load(floor_ptr + n)
    k, p = tl.load(top_k_ptr + n), tl.load(top_p_ptr + n)
    row = candidates_ptr + n.to(tl.int64) * NUM
    target = p * tl.sum(_parts(mass_ptr, 0.0, CHUNKS, BLOCK_C), 0)
    running = 0.0
    first = 0
    for start in range(0, NUM, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row + place, mask=place < NUM, other=float("-inf")).to(tl.float32) / scale
        mass = running + tl.cumsum(_weights(x, best, floor), 0)
        first += tl.sum(((mass < target) & (place < NUM)).to(tl.int32), 0)
        running = tl.max(mass, 0)
    last = tl.load(row + NUM - 1).to(tl.float32) / scale
    edge = tl.load(row + tl.minimum(first, NUM - 1)).to(tl.float32) / scale
    is_off = p >= 1.0
    is_reached = first < NUM
    top_k_decided = (k <= NUM) | (k >= VOCAB) | (last < floor)
    top_p_decided = is_off | is_reached | (last < floor) | (NUM == VOCAB)
    tl.store(covered_ptr + n, top_k_decided & top_p_decided)
    is_raised = is_reached & (is_off == 0)
    tl.store(floor_ptr + n, tl.where(is_raised, tl.maximum(floor, edge), floor))


@triton.jit(do_not_specialize=["temperature_ptr", "uniform_ptr"])
def draw_kernel(
    token_ptr,
    covered_ptr,
    logits_ptr,
    mass_ptr,
    top_ptr,
    floor_ptr,
    temperature_ptr,
    uniform_ptr,
    stride,
    IS_PLAIN: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first kept token whose running mass exceeds uniform times the whole. Grid: (rows,).

    Rounding may leave the whole at or below the target; then it is the last kept token, never
    one that was dropped. Rows of temperature 0 keep the token that `floor_kernel` stored.
    """
    n = tl.program_id(0)
    temperature = tl.load(temperature_ptr + n)
    mass = _parts(mass_ptr, 0.0, CHUNKS, BLOCK_C)
    ends = tl.cumsum(mass, 0)
    target = tl.load(uniform_ptr + n) * tl.max(ends, 0)
    c = tl.arange(0, BLOCK_C)
    last_chunk = tl.max(tl.where(mass > 0.0, c, 0), 0)
    chunk = tl.min(tl.where((ends > target) & (mass > 0.0), c, last_chunk), 0)
    start = tl.max(tl.where(c < chunk, ends, 0.0), 0)

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    row = logits_ptr + n.to(tl.int64) * stride
    x = tl.load(row + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    weight = _weights(x / _scale(temperature_ptr, n), tl.load(top_ptr + n), tl.load(floor_ptr + n))
    inside = start + tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0.0, column, 0), 0)
    token = tl.min(tl.where((inside > target) & (weight > 0.0), column, last), 0)
    is_greedy = temperature <= 0.0
    tl.store(token_ptr + n, tl.where(is_greedy, tl.load(token_ptr + n), token))
    if IS_PLAIN:
        tl.store(covered_ptr + n, True)
    else:
        tl.store(covered_ptr + n, tl.load(covered_ptr + n).to(tl.int1) | is_greedy)


@triton.jit(do_not_specialize=["targets_ptr"])
def chunk_logprob_kernel(
    best_ptr,
    total_ptr,
    above_ptr,
    logits_ptr,
    targets_ptr,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each chunk: its largest logit, its sum, and how many exceed the target's.

    Grid: (rows, chunks).
    """
    n = tl.program_id(0)
    x = _chunk(logits_ptr, stride, 1.0, VOCAB, BLOCK)
    target = tl.minimum(tl.maximum(tl.load(targets_ptr + n), 0), VOCAB - 1)
    chosen = tl.load(logits_ptr + n.to(tl.int64) * stride + target).to(tl.float32)
    best = tl.max(x, 0)
    part = n * tl.num_programs(1) + tl.program_id(1)
    # A chunk that is forbidden as a whole has best -inf, and -inf - -inf is NaN.
    shift = tl.where(best == float("-inf"), 0.0, best)
    tl.store(best_ptr + part, best)
    tl.store(total_ptr + part, tl.sum(tl.exp(x - shift), 0))
    tl.store(above_ptr + part, tl.sum((x > chosen).to(tl.int32), 0))


@triton.jit(do_not_specialize=["targets_ptr"])
def logprob_kernel(
    logprob_ptr,
    rank_ptr,
    norm_ptr,
    best_ptr,
    total_ptr,
    above_ptr,
    logits_ptr,
    targets_ptr,
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Log-probability and rank of the target, and log of the normaliser. Grid: (rows,)."""
    n = tl.program_id(0)
    target = tl.minimum(tl.maximum(tl.load(targets_ptr + n), 0), VOCAB - 1)
    chosen = tl.load(logits_ptr + n.to(tl.int64) * stride + target).to(tl.float32)
    parts = _parts(best_ptr, float("-inf"), CHUNKS, BLOCK_C)
    best = tl.max(parts, 0)
    total = tl.sum(_parts(total_ptr, 0.0, CHUNKS, BLOCK_C) * tl.exp(parts - best), 0)
    norm = best + tl.log(total)
    tl.store(norm_ptr + n, norm)
    tl.store(logprob_ptr + n, chosen - norm)
    tl.store(rank_ptr + n, 1 + tl.sum(_parts(above_ptr, 0, CHUNKS, BLOCK_C), 0))
