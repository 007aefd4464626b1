"""Paged attention in plain torch against the oracle, in both kinds of plan."""

import numpy as np
import pytest
import torch

from leadframe.conformance.attention_cases import Shape, make_problem
from leadframe.conformance.batches import Padding
from leadframe.platform import KVLayerSpec, KVSpec
from leadframe_torch.attention_plan import _similar

MIXED = {
    "decodes": (1, 15, 16, 17, 100, 3),
    "chunks": ((5, 5), (7, 40), (1, 33)),
    "padding": Padding(decodes=2, rows=1, tokens=3, blocks=2),
}
SHAPES = {
    "mixed": Shape(**MIXED),
    "one-group": Shape(decodes=(40, 41, 42)),
    "window": Shape(**MIXED, window=9),
    "softcap": Shape(**MIXED, softcap=1.5),
    "both": Shape(**MIXED, window=20, softcap=3.0),
    "gqa-1": Shape(**MIXED, heads=3, kv_heads=3, dim=80),
    "gqa-8": Shape(**MIXED, heads=8, kv_heads=1, dim=96),
    "gqa-3": Shape(**MIXED, heads=9, kv_heads=3),
    "wide": Shape(decodes=(20,), chunks=((6, 6),), heads=2, kv_heads=1, dim=256),
    "small-blocks": Shape(**MIXED, block_size=4),
    "shared": Shape(decodes=(40, 60), chunks=((4, 50),), shares=True),
    "chunks-only": Shape(chunks=((9, 9), (3, 20)), padding=Padding(tokens=4)),
}


@pytest.mark.parametrize("reads", [True, False], ids=["fitted", "static"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_attention_matches_the_oracle(make_backend, solve, rng, name, reads, poison, monkeypatch):
    backend = make_backend()
    monkeypatch.setattr(backend, "may_read_lengths", lambda: reads)
    problem = make_problem(SHAPES[name], rng, poison)
    out, want, pool, want_pool = solve(backend, problem)
    live = problem.live
    np.testing.assert_allclose(out[live], want[live], rtol=3e-5, atol=3e-5)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(pool[1:], want_pool[1:].astype(np.float32))


@pytest.mark.parametrize("reads", [True, False])
def test_bfloat16_attention_is_close(make_backend, solve, rng, reads, monkeypatch):
    backend = make_backend()
    monkeypatch.setattr(backend, "may_read_lengths", lambda: reads)
    problem = make_problem(Shape(**MIXED, dtype="bfloat16"), rng)
    out, want, *_ = solve(backend, problem)
    np.testing.assert_allclose(out[problem.live], want[problem.live], rtol=0.05, atol=0.05)


def test_padding_rows_are_zero(backend, solve, rng):
    problem = make_problem(SHAPES["mixed"], rng)
    out, *_ = solve(backend, problem)
    dead = np.setdiff1d(np.arange(len(out)), problem.live)
    assert len(dead) == 5
    assert not out[dead].any()


def test_decodes_of_unlike_length_do_not_share_a_group():
    assert _similar([2, 100, 90, 2, 3]) == [[1, 2], [0, 3, 4]]
    assert _similar([]) == []


def test_copy_moves_blocks_and_nothing_else(backend, rng):
    (layer,) = backend.kv_alloc(KVSpec((KVLayerSpec(2, 8),), 4), 6)
    data = rng.standard_normal((6, 2, 4, 2, 8)).astype(np.float32)
    backend.kv_write(layer, range(6), data)
    layer = backend.ops["kv_copy"](layer, np.array([1, 4], np.int32), np.array([3, 2], np.int32))
    data[[3, 2]] = data[[1, 4]]
    np.testing.assert_array_equal(backend.kv_read(layer, range(6)), data)


def test_static_plans_read_nothing(make_backend, monkeypatch, rng):
    backend = make_backend()
    monkeypatch.setattr(backend, "may_read_lengths", lambda: False)
    problem = make_problem(SHAPES["mixed"], rng)
    arrays = problem.arrays
    meta = {
        name: torch.empty(getattr(arrays, name).shape, dtype=torch.int32, device="meta")
        for name in ("query_start", "seq_lens", "block_table", "slots")
    }
    import dataclasses

    batch = dataclasses.replace(arrays, **meta)
    plan = backend.ops["plan"](batch, problem.params)
    assert len(plan.groups(16)) == 2  # reading a meta tensor would have raised
