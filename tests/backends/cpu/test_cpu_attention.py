"""The native attention kernel and its cache against the oracle."""

import numpy as np
import pytest

from leadframe.conformance.attention_cases import Shape, make_problem
from leadframe.conformance.batches import Padding
from leadframe.platform import KVLayerSpec, KVSpec
from leadframe_cpu.native_kv import NativeKV

MIXED = {
    "decodes": (1, 15, 16, 17, 63, 64, 65, 130),
    "chunks": ((5, 5), (20, 50), (37, 37), (3, 161)),
    "padding": Padding(decodes=2, rows=1, tokens=3, blocks=2),
}
SHAPES = {
    "gqa-3": Shape(**MIXED, heads=9, kv_heads=3),
    "gqa-1": Shape(**MIXED, heads=2, kv_heads=2, dim=80),
    "gqa-4": Shape(**MIXED, heads=4, kv_heads=1, dim=96),
    "gqa-5": Shape(**MIXED, heads=5, kv_heads=1),
    "gqa-7": Shape(**MIXED, heads=14, kv_heads=2),
    "gqa-8": Shape(**MIXED, heads=16, kv_heads=2, dim=128),
    "gqa-20": Shape(**MIXED, heads=20, kv_heads=1, dim=32),  # more than a register tile
    "dim-256": Shape(**MIXED, heads=4, kv_heads=1, dim=256),
    "dim-8": Shape(**MIXED, heads=2, kv_heads=1, dim=8),  # padded in the cache
    "dim-40": Shape(**MIXED, heads=2, kv_heads=1, dim=40),
    "window-3": Shape(**MIXED, window=3),
    "window-70": Shape(**MIXED, window=70),
    "softcap": Shape(**MIXED, softcap=1.5),
    "both": Shape(**MIXED, window=65, softcap=3.0),
    "block-32": Shape(**MIXED, block_size=32),
    "block-128": Shape(**MIXED, block_size=128, window=50),
    "block-4": Shape(**MIXED, block_size=4),  # too small for the kernel: torch serves it
    "shared": Shape(decodes=(40, 60), chunks=((4, 50),), shares=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_attention_matches_the_oracle(native, solve, rng, name, poison):
    problem = make_problem(SHAPES[name], rng, poison)
    out, want, pool, want_pool = solve(native, problem)
    np.testing.assert_allclose(out[problem.live], want[problem.live], rtol=2e-5, atol=2e-5)
    dead = np.setdiff1d(np.arange(len(out)), problem.live)
    assert not out[dead].any()
    np.testing.assert_array_equal(pool[1:], want_pool[1:].astype(np.float32))


@pytest.mark.parametrize("name", ["gqa-3", "both", "block-32"])
def test_bfloat16_attention_is_close(native, solve, rng, name):
    from dataclasses import replace

    problem = make_problem(replace(SHAPES[name], dtype="bfloat16"), rng)
    out, want, *_ = solve(native, problem)
    np.testing.assert_allclose(out[problem.live], want[problem.live], rtol=0.03, atol=0.03)


def test_scores_far_apart_leave_exactly_one_value(native, solve, rng):
    problem = make_problem(Shape(decodes=(200,), heads=2, kv_heads=2), rng)
    problem.q[:] = problem.k[:] * 1000  # the newest key's score dwarfs the others
    problem.k[:] *= 100
    problem.pool[:, 1] *= 1e37  # so a weight that is merely tiny would show
    out, *_ = solve(native, problem)
    np.testing.assert_array_equal(out, problem.v.astype(np.float32))


def test_a_row_does_not_depend_on_its_batch(native, solve, rng):
    """Bit for bit: alone or with others, in one chunk or token by token."""
    together = make_problem(Shape(chunks=((70, 70), (9, 30)), heads=9, kv_heads=3), rng)
    whole, *_ = solve(native, together)
    row = together.spec.rows[0]
    alone = make_problem(Shape(chunks=((70, 70),), heads=9, kv_heads=3), rng)
    alone.q, alone.k, alone.v = together.q[:70], together.k[:70], together.v[:70]
    np.testing.assert_array_equal(solve(native, alone)[0], whole[:70])
    last = make_problem(Shape(decodes=(70, 5), heads=9, kv_heads=3), rng)
    for position in range(69):
        block = last.spec.rows[0].blocks[position // 16]
        last.pool[block, 0, position % 16] = together.k[position]
        last.pool[block, 1, position % 16] = together.v[position]
    last.q[0], last.k[0], last.v[0] = together.q[69], together.k[69], together.v[69]
    np.testing.assert_array_equal(solve(native, last)[0][0], whole[69])
    assert len(row.blocks) == 5


def test_nan_of_a_query_stays_with_it(native, solve, rng):
    problem = make_problem(Shape(decodes=(20, 30), heads=3, kv_heads=1), rng)
    clean, *_ = solve(native, problem)
    problem.q[1, 2] = np.nan
    out, *_ = solve(native, problem)
    assert np.isnan(out[1, 2]).all()
    np.testing.assert_array_equal(out[0], clean[0])
    np.testing.assert_array_equal(out[1, :2], clean[1, :2])


@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (32, 40), (4, 64)])
def test_the_cost_of_a_block_is_what_is_allocated(native, block_size, dim):
    spec = KVSpec((KVLayerSpec(3, dim), KVLayerSpec(1, dim)), block_size, "bfloat16")
    before = native.memory().used
    kv = native.kv_alloc(spec, 7)
    assert native.memory().used - before == 7 * native.kv_block_bytes(spec)
    assert isinstance(kv[0], NativeKV) == (block_size != 4)
    if dim == 64:  # nothing is padded: the arithmetic that operators know
        assert native.kv_block_bytes(spec) == 2 * 4 * block_size * dim * 2
    native.kv_free(kv)
    assert native.memory().used == before


@pytest.mark.parametrize("block_size", [16, 4])
def test_copy_moves_blocks_and_nothing_else(native, rng, block_size):
    (layer,) = native.kv_alloc(KVSpec((KVLayerSpec(2, 24),), block_size), 6)
    data = rng.standard_normal((6, 2, block_size, 2, 24)).astype(np.float32)
    native.kv_write(layer, range(6), data)
    layer = native.ops["kv_copy"](layer, np.array([1, 4], np.int32), np.array([3, 2], np.int32))
    data[[3, 2]] = data[[1, 4]]
    np.testing.assert_array_equal(native.kv_read(layer, range(6)), data)
