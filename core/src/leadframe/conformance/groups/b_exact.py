"""Group B: addressing, bit for bit.

Scores are made one-hot, so that attention must return one V row exactly: a wrong block, offset,
head or mask returns another row and cannot hide in a tolerance. Keys that must not be seen carry
the same code at twice the size: if one is read, it wins.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from leadframe.conformance.attention_cases import (
    Floats,
    Problem,
    Shape,
    make_problem,
    oracle_layer,
    solve,
)
from leadframe.conformance.batches import Padding
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import fit, not_claimed
from leadframe.conformance.kit import Kit
from leadframe.platform import AttnParams

_GAP = 120.0  # exp(-120) is 0 in float32
_CHOICES = ("self", "first", "block-start", "block-end", "last-block", "window-edge", "random")

SHAPES = {
    "decode": Shape(heads=6, kv_heads=3, decodes=(1, 16, 17, 33, 64, 65)),
    "chunks": Shape(heads=6, kv_heads=3, chunks=((17, 17), (5, 36), (16, 48), (1, 33))),
    "mixed": Shape(
        heads=4,
        kv_heads=2,
        decodes=(31, 32, 33),
        chunks=((18, 18), (4, 52)),
        padding=Padding(decodes=2, rows=1, tokens=3, blocks=2),
    ),
    "mha": Shape(heads=3, kv_heads=3, decodes=(20, 40), chunks=((10, 30),)),
    "shared": Shape(decodes=(70, 50), chunks=((6, 60),), shares=True),
}


def _target(choice: str, position: int, shape: Shape, rng: np.random.Generator) -> int:
    size, oldest = shape.block_size, 0
    if shape.window is not None:
        oldest = max(0, position - shape.window + 1)
    places = {
        "self": position,
        "first": oldest,
        "block-start": position // size * size,
        "block-end": position // size * size - 1,
        "last-block": position - position % size // 2,
        "window-edge": oldest,
        "random": int(rng.integers(oldest, position + 1)),
    }
    return max(oldest, min(position, places[choice]))


def _codes(count: int, dim: int, rng: np.random.Generator) -> Floats:
    """Distinct vectors of plus and minus one."""
    while True:
        codes = rng.choice([-1.0, 1.0], (count, dim))
        overlap = codes @ codes.T
        np.fill_diagonal(overlap, -dim)
        if count == 1 or overlap.max() < dim * 0.9:
            return codes


def _magnitude(codes: Floats) -> float:
    """A power of two by which one-hot scores win by the gap, and decoys of twice the size too."""
    overlap = codes @ codes.T
    np.fill_diagonal(overlap, -np.inf)
    nearest = codes.shape[1] - (overlap.max() if len(codes) > 1 else 0.0)
    return float(2 ** np.ceil(np.log2(_GAP / nearest)))


def exact_problem(
    shape: Shape, choice: str, rng: np.random.Generator
) -> tuple[Problem, npt.NDArray[np.int64]]:
    """Returns a problem and the position [T, H] that each query of each head must read.

    Values and codes are small integers, exact in every dtype. Slots that no query of a row may
    see hold decoys.
    """
    problem = make_problem(shape, rng, 0.0)
    problem.params = AttnParams.of(1.0, shape.window)
    longest = max(row.seq_len for row in problem.spec.rows)
    codes = _codes(longest, shape.dim, rng)
    magnitude = _magnitude(codes)
    problem.pool[:] = 7.0
    targets = np.zeros((problem.batch.bucket.num_tokens, shape.heads), np.int64)
    tokens = iter(problem.live)
    for row in problem.spec.rows:
        _fill_old(problem, row.blocks, row.seq_len - row.num_tokens, codes)
        for position in range(row.seq_len - row.num_tokens, row.seq_len):
            token = next(tokens)
            problem.k[token] = codes[position]
            for head in range(shape.heads):
                target = _target(choice, position, shape, rng)
                targets[token, head] = target
                problem.q[token, head] = magnitude * codes[target]
    problem.v = rng.integers(-100, 100, problem.v.shape).astype(np.float64)
    _plant_decoys(problem, codes, targets)
    return problem, targets


def _fill_old(problem: Problem, blocks: tuple[int, ...], count: int, codes: Floats) -> None:
    """Writes the keys and values [0, count) of a row."""
    size, shape = problem.shape.block_size, problem.shape
    for position in range(count):
        block, offset = blocks[position // size], position % size
        problem.pool[block, 0, offset] = codes[position]
        values = (block * 31 + offset * 7 + np.arange(shape.kv_heads * shape.dim)) % 127 - 63
        problem.pool[block, 1, offset] = values.reshape(shape.kv_heads, shape.dim)


def _plant_decoys(problem: Problem, codes: Floats, targets: npt.NDArray[np.int64]) -> None:
    """Puts a row's own target codes, doubled, where that row must not look.

    In the tails of last blocks, in blocks of nobody, in the null block, and, with a window, at
    positions that every query of the row has left behind.
    """
    size, window = problem.shape.block_size, problem.shape.window
    lure = codes[targets.max()] * 2
    read: set[tuple[int, int]] = set()
    tokens = iter(problem.live)
    lures: dict[tuple[int, int], Floats] = {}
    for row in problem.spec.rows:
        mine = [next(tokens) for _ in range(row.num_tokens)]
        oldest = 0 if window is None else row.seq_len - row.num_tokens - window + 1
        for position in range(len(row.blocks) * size):
            slot = (row.blocks[position // size], position % size)
            if oldest <= position < row.seq_len:
                read.add(slot)
            else:
                lures[slot] = codes[targets[mine[-1], 0]] * 2
    for block in range(len(problem.pool)):
        for offset in range(size):
            if (block, offset) not in read:
                problem.pool[block, 0, offset] = lures.get((block, offset), lure)


def expected_rows(problem: Problem, targets: npt.NDArray[np.int64]) -> Floats:
    """The V row that each live token of each head must return, [live, H, D]."""
    shape = problem.shape
    layer = oracle_layer(problem.pool)
    arrays = problem.arrays
    blocks, offsets = arrays.slots // shape.block_size, arrays.slots % shape.block_size
    layer[blocks[problem.live], offsets[problem.live]] = np.concatenate(
        [problem.k[problem.live], problem.v[problem.live]], axis=1
    )
    out = []
    tokens = iter(problem.live)
    for row in problem.spec.rows:
        for _ in range(row.num_tokens):
            token = next(tokens)
            rows = []
            for head in range(shape.heads):
                target = int(targets[token, head])
                block = row.blocks[target // shape.block_size]
                kv_head = shape.kv_heads + head // (shape.heads // shape.kv_heads)
                rows.append(layer[block, target % shape.block_size, kv_head])
            out.append(np.stack(rows))
    return np.stack(out)


def run_exact(kit: Kit, shape: Shape, choice: str, capture: bool = False) -> None:
    """Fails unless every head of every token returns exactly the V row of its target."""
    problem, targets = exact_problem(shape, choice, kit.rng)
    want = expected_rows(problem, targets)
    outcome = solve(kit, problem, capture)
    kit.same(f"V row of target {choice!r}", outcome.out[problem.live].astype(np.float64), want)


def _case(name: str, choice: str, shape: Shape) -> Case:
    return Case(f"B.exact[{name}-{choice}]", lambda kit: run_exact(kit, fit(kit, shape), choice))


def _window_case(name: str, choice: str, window: int) -> Case:
    shape = replace(SHAPES[name], window=window)
    return Case(
        f"B.exact[window-{window}-{name}-{choice}]",
        lambda kit: run_exact(kit, fit(kit, shape), choice),
        "core",
        lambda kit: not_claimed(kit, fit(kit, shape)),
    )


CASES = [
    *(
        _case(name, choice, SHAPES[name])
        for name in SHAPES
        for choice in _CHOICES
        if choice != "window-edge"
    ),
    *(
        _window_case(name, choice, window)
        for name in ("decode", "chunks", "mixed")
        for choice in ("window-edge", "self", "random")
        for window in (5, 16)
    ),
]
