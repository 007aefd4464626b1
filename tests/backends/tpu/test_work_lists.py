"""Work lists against their definition, token by token, over random batches of one bucket."""

import jax
import numpy as np
import pytest

from leadframe.platform.batch import Bucket, packed_sizes, unpack
from leadframe_tpu.kernels import work
from leadframe_tpu.kernels.append import append_rows

BUCKET = Bucket(150, 12, 4, 5, 12)
BLOCK = 16


def random_batch(rng):
    """Decode rows with some padding, then chunk rows, one of them padded, and loose tokens."""
    ints = np.zeros(packed_sizes(BUCKET)[0], np.int32)
    arrays = unpack(BUCKET, ints, None)
    counts = np.zeros(BUCKET.num_seqs, np.int32)
    counts[: BUCKET.num_decodes] = 1
    live = rng.integers(0, 9)
    counts[BUCKET.num_decodes : BUCKET.num_decodes + live] = rng.integers(1, 18, live)
    seq_lens = np.where(counts > 0, counts + rng.integers(0, 60, BUCKET.num_seqs), 0)
    seq_lens[: BUCKET.num_decodes][rng.random(BUCKET.num_decodes) < 0.3] = 0
    arrays.query_start[:] = np.concatenate([[0], np.cumsum(counts)])
    arrays.seq_lens[:] = np.minimum(seq_lens, BUCKET.num_blocks * BLOCK)
    arrays.block_table[:] = rng.integers(1, 100, arrays.block_table.shape)
    return ints, arrays


@pytest.fixture(scope="module", params=[None, 7])
def tiles_of(request):
    window, rows = request.param, (0, BUCKET.num_seqs)
    make = jax.jit(lambda ints: work.attention_tiles(unpack(BUCKET, ints, None), rows, window))
    return window, make


def test_every_live_token_is_in_one_tile_with_its_keys(tiles_of):
    window, make = tiles_of
    rng = np.random.default_rng(0)
    for _ in range(40):
        ints, arrays = random_batch(rng)
        tiles = jax.tree.map(np.asarray, make(ints))
        assert _queries(tiles) == _expected_queries(arrays)
        _check_keys(tiles, window)
        _check_next_live(tiles)


def _queries(tiles):
    """(token, position, block table) of every query of every tile that is not empty."""
    out = []
    for tile in np.flatnonzero(tiles.first_key < tiles.end_key):
        start = tiles.table_start[tile]
        table = tuple(tiles.block_table[start : start + tiles.num_blocks])
        for query in range(tiles.num_queries[tile]):
            out.append((tiles.first_token[tile] + query, tiles.position[tile] + query, table))
    return out


def _expected_queries(arrays):
    out = []
    for row, seq_len in enumerate(arrays.seq_lens):
        first, end = arrays.query_start[row : row + 2]
        if seq_len:
            table = tuple(arrays.block_table[row])
            out += [(token, seq_len - end + token, table) for token in range(first, end)]
    return out


def _check_keys(tiles, window):
    live = np.flatnonzero(tiles.first_key < tiles.end_key)
    last = tiles.position[live] + tiles.num_queries[live] - 1
    np.testing.assert_array_equal(tiles.end_key[live], last + 1)
    oldest = 0 if window is None else np.maximum(0, tiles.position[live] - window + 1)
    np.testing.assert_array_equal(tiles.first_key[live], np.zeros_like(live) + oldest)


def _check_next_live(tiles):
    count = len(tiles.first_key)
    live = np.flatnonzero(tiles.first_key < tiles.end_key)
    for tile in range(count + 1):
        after = live[live >= tile]
        assert tiles.next_live[tile] == (after[0] if len(after) else count)


def test_a_group_of_decodes_has_as_many_tiles_as_rows():
    bucket = Bucket(12, 12, 12, 5, 12)
    ints = np.zeros(packed_sizes(bucket)[0], np.int32)
    arrays = unpack(bucket, ints, None)
    arrays.query_start[:], arrays.seq_lens[:] = np.arange(13), 20
    make = jax.jit(lambda ints: work.attention_tiles(unpack(bucket, ints, None), (4, 9), None))
    tiles = make(ints)
    np.testing.assert_array_equal(tiles.first_token, np.arange(4, 9))
    np.testing.assert_array_equal(tiles.end_key, np.full(5, 20))


def test_query_tile_is_a_power_of_two_that_suits_the_batch():
    assert work.query_tile(7, 7) == 1
    assert [work.query_tile(n, 0) for n in (1, 8, 9, 16, 17, 500)] == [8, 8, 16, 16, 32, 32]


def test_live_tokens():
    rng = np.random.default_rng(1)
    find = jax.jit(lambda ints: work.live_tokens(unpack(BUCKET, ints, None)))
    for _ in range(10):
        ints, arrays = random_batch(rng)
        wanted = {token for token, _, _ in _expected_queries(arrays)}
        assert set(np.flatnonzero(find(ints))) == wanted


# --- runs ---------------------------------------------------------------------------------

TOKENS, BLOCKS, LANES = 300, 40, 256


def _append(cache, rows, slots):
    return append_rows(cache, rows, work.append_runs(slots), True)


@pytest.fixture(scope="module")
def append():
    return jax.jit(_append)


def _slots(kind, rng):
    """Slots of a step: 0 is padding, no other slot comes twice."""
    if kind == "chunks":  # as the engine makes them: ascending within permuted blocks
        start = rng.integers(BLOCK, 2 * BLOCK)
        slots = np.arange(start, start + TOKENS)
        slots[rng.integers(1, TOKENS) :] += BLOCK + rng.integers(0, BLOCK)
        slots[TOKENS - rng.integers(0, 20) :] = 0
    elif kind == "neighbours":  # each token rewrites a tile that others just wrote
        slots = BLOCK + rng.permutation(TOKENS)
    else:
        slots = rng.choice(np.arange(BLOCK, BLOCKS * BLOCK), TOKENS, replace=False)
        slots[rng.random(TOKENS) < 0.2] = 0
    return slots.astype(np.int32)


@pytest.mark.parametrize("kind", ["chunks", "neighbours", "anywhere"])
def test_append_writes_each_row_to_its_slot_and_nothing_else(append, kind):
    rng = np.random.default_rng(2)
    for _ in range(3):
        slots = _slots(kind, rng)
        cache = rng.standard_normal((BLOCKS, BLOCK, LANES)).astype(np.float32)
        rows = rng.standard_normal((TOKENS, LANES)).astype(np.float32)
        wanted = cache.copy().reshape(-1, LANES)
        wanted[slots[slots > 0]] = rows[slots > 0]
        np.testing.assert_array_equal(
            np.asarray(append(cache, rows, slots)).reshape(wanted.shape), wanted
        )


def test_runs_are_short_for_what_the_engine_sends():
    slots = np.concatenate([np.arange(20, 148), np.arange(160, 200)]).astype(np.int32)
    runs = jax.tree.map(np.asarray, jax.jit(work.append_runs)(slots))
    count = runs.bounds[-1]
    assert count <= 168 // 8 + 4
    assert runs.length[:count].sum() == 168
    assert not runs.must_wait[:count].any()


def test_a_run_waits_for_a_recent_one_that_wrote_its_rows():
    slots = np.array([16, 40, 17, *range(160, 160 + 9 * 16, 16), 18], np.int32)
    runs = jax.tree.map(np.asarray, jax.jit(work.append_runs)(slots))
    wanted = np.zeros(len(slots), np.int32)
    wanted[2] = 1  # the last token is ten runs away: its rows are in memory by then
    np.testing.assert_array_equal(runs.must_wait, wanted)
