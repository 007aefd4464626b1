"""Attention and kv_append, interpreted, against the float64 oracle.

The conformance kit covers what every backend must do; these are the places where this one's
tiles, panels, runs and groups begin and end.
"""

import numpy as np
import pytest

from leadframe.conformance.attention_cases import Shape, check_outcome, make_problem, solve
from leadframe.conformance.batches import Padding
from leadframe_tpu.capabilities import HEAD_DIMS
from leadframe_tpu.kernels import work

PADDED = Padding(decodes=1, rows=2, tokens=3, blocks=1)


def run(kit, shape, poison=np.nan):
    problem = make_problem(shape, np.random.default_rng(0), poison)
    check_outcome(kit, problem, solve(kit, problem))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dim(kit, dim):
    run(kit, Shape(dim=dim, decodes=(21, 1), chunks=((9, 30),), padding=PADDED))


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_size_and_dtype(kit, block_size, dtype):
    shape = Shape(block_size=block_size, dtype=dtype, decodes=(41,), chunks=((35, 60),))
    run(kit, shape)


TILES = {
    "several panels": Shape(heads=2, kv_heads=1, block_size=32, decodes=(1100, 513, 512, 1)),
    "panels of a chunk": Shape(heads=2, kv_heads=1, block_size=32, chunks=((40, 1060), (1, 600))),
    "full tiles": Shape(chunks=((64, 64), (65, 80), (32, 33))),
    "a chunk of single tokens": Shape(chunks=((1, 7), (1, 40), (1, 1), (2, 9), (1, 33))),
    "more tokens than a token tile": Shape(chunks=((131, 131), (30, 47))),
    "fewer tokens than a tile": Shape(chunks=((3, 3),)),
    "window inside a panel": Shape(window=5, decodes=(90, 3), chunks=((40, 90),), padding=PADDED),
    "window over panels": Shape(
        heads=2, kv_heads=1, block_size=32, window=520, decodes=(1100,), chunks=((33, 1090),)
    ),
    "softcap": Shape(softcap=1.5, decodes=(33,), chunks=((40, 41),), padding=PADDED),
    "one query head": Shape(heads=1, kv_heads=1, decodes=(20,), chunks=((10, 12),)),
    "nine query heads a group": Shape(heads=9, kv_heads=1, decodes=(20,), chunks=((34, 35),)),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_and_panels(kit, name):
    run(kit, TILES[name])


@pytest.mark.parametrize("poison", [np.inf, 3e38])
def test_unread_slots_have_no_influence(kit, poison):
    shape = Shape(decodes=(17, 31), chunks=((5, 20),), window=9, padding=PADDED)
    run(kit, shape, poison)


def test_block_tables_that_exceed_scalar_memory_are_split(kit, monkeypatch):
    shape = Shape(decodes=(33, 1, 40), chunks=((20, 25), (1, 30), (6, 6)), padding=PADDED)
    problem = make_problem(shape, np.random.default_rng(0))
    bucket = problem.batch.bucket
    monkeypatch.setattr(work, "MAX_TABLE_INTS", 2 * bucket.num_blocks)
    assert len(work.row_groups(bucket.num_seqs, bucket.num_blocks)) == -(-bucket.num_seqs // 2)
    check_outcome(kit, problem, solve(kit, problem))


def test_a_batch_of_padding_alone_is_finite(kit):
    shape = Shape(decodes=(5,), padding=Padding(decodes=7, rows=3, tokens=9))
    problem = make_problem(shape, np.random.default_rng(0))
    problem.arrays.seq_lens[:] = 0
    problem.arrays.slots[:] = 0
    outcome = solve(kit, problem)
    assert not outcome.out.any()
    np.testing.assert_array_equal(outcome.pool[1:], outcome.exact_pool[1:])
