"""The reference ops against the plainest code that computes the same thing."""

import dataclasses
import math

import array_api_strict
import numpy as np
import pytest

from leadframe.conformance.batches import BatchSpec, Padding, Row, live_tokens, make_batch
from leadframe.platform import OP_NAMES, AttnParams, reference_ops, unpack
from leadframe.platform.reference.namespace import numpy_namespace

BLOCK = 4


NUMPY = numpy_namespace()


@pytest.fixture(params=["numpy", "strict"])
def lib(request, strict_namespace):
    """(ops, to_array, to_numpy) over NumPy and over the strict array API."""
    if request.param == "numpy":
        return reference_ops(NUMPY), lambda x: np.array(x), np.asarray
    return reference_ops(strict_namespace), array_api_strict.asarray, lambda x: np.array(x._array)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


SPEC = BatchSpec(
    rows=(
        Row(1, 7, (3, 5)),
        Row(1, 1, (2,)),
        Row(1, 8, (3, 9)),
        Row(5, 5, (6, 7)),
        Row(3, 11, (8, 1, 4)),
    ),
    block_size=BLOCK,
    num_decodes=3,
    padding=Padding(decodes=1, rows=2, tokens=3, blocks=1),
)


def _arrays(batch, array):
    """Unpacked on the host: `.reshape` is no part of the array API standard."""
    host = unpack(batch.bucket, batch.ints, batch.floats)
    named = {f.name: getattr(host, f.name) for f in dataclasses.fields(host)}
    given = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(host, **{name: array(value) for name, value in given.items()})


def _naive_attention(q, k, v, position, params):
    """One query [H, D] over keys [n, K, D]."""
    out = np.zeros(q.shape)
    first = 0 if params.window is None else max(0, position - params.window + 1)
    for h in range(q.shape[0]):
        head = h // (q.shape[0] // k.shape[1])
        scores = k[first : position + 1, head] @ q[h] * params.scale
        if params.softcap is not None:
            scores = params.softcap * np.tanh(scores / params.softcap)
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ v[first : position + 1, head]
    return out


def _cached(kv, row, num_kv_heads):
    """K and V [seq_len, K, D] of a row, read from the reference layout."""
    flat = np.concatenate([kv[block] for block in row.blocks])[: row.seq_len]
    return flat[:, :num_kv_heads], flat[:, num_kv_heads:]


@pytest.mark.parametrize(
    "params",
    [
        AttnParams.of(0.35),
        AttnParams.of(0.35, window=3),
        AttnParams.of(0.35, softcap=2.0),
        AttnParams.of(0.35, window=5, softcap=1.0),
    ],
)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
def test_attention_matches_one_query_at_a_time(lib, rng, params, heads):
    ops, array, host = lib
    num_heads, num_kv_heads = heads
    batch = make_batch(SPEC)
    arrays = _arrays(batch, array)
    kv = rng.standard_normal((10, BLOCK, 2 * num_kv_heads, 8)).astype(np.float32)
    q = rng.standard_normal((batch.bucket.num_tokens, num_heads, 8)).astype(np.float32)
    out = host(ops["attention"](array(q), array(kv), arrays, params))
    assert np.isfinite(out).all()
    tokens = iter(live_tokens(SPEC))
    for row in SPEC.rows:
        k, v = _cached(kv, row, num_kv_heads)
        for position in range(row.seq_len - row.num_tokens, row.seq_len):
            token = next(tokens)
            want = _naive_attention(q[token], k, v, position, params)
            np.testing.assert_allclose(out[token], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_unread_slots_have_no_influence(lib, rng, poison, window):
    ops, array, host = lib
    batch = make_batch(SPEC)
    arrays = _arrays(batch, array)
    q = array(rng.standard_normal((batch.bucket.num_tokens, 4, 8)).astype(np.float32))
    clean = np.zeros((12, BLOCK, 4, 8), np.float32)
    read = np.zeros((12, BLOCK), bool)
    for row in SPEC.rows:
        for position in range(row.seq_len):
            oldest = row.seq_len - row.num_tokens
            if window is None or position > oldest - window:
                read[row.blocks[position // BLOCK], position % BLOCK] = True
    clean[read] = rng.standard_normal((int(read.sum()), 4, 8))
    dirty = clean.copy()
    dirty[~read] = poison
    params = AttnParams.of(0.3, window=window)
    want, got = (host(ops["attention"](q, array(kv), arrays, params)) for kv in (clean, dirty))
    np.testing.assert_array_equal(got, want)


def test_append_writes_slots_and_padding_writes_block_0(lib, rng):
    ops, array, host = lib
    batch = make_batch(SPEC)
    arrays = _arrays(batch, array)
    k, v = rng.standard_normal((2, batch.bucket.num_tokens, 2, 8)).astype(np.float32)
    kv = np.full((12, BLOCK, 4, 8), 9.0, np.float32)
    out = host(ops["kv_append"](array(kv), array(k), array(v), arrays))
    want = np.full_like(kv, 9.0)
    slots = host(arrays.slots)
    for token in live_tokens(SPEC):
        want[slots[token] // BLOCK, slots[token] % BLOCK] = np.concatenate([k[token], v[token]])
    np.testing.assert_array_equal(out[1:], want[1:])


def test_copy_moves_whole_blocks(lib, rng):
    ops, array, host = lib
    kv = rng.standard_normal((6, BLOCK, 4, 8)).astype(np.float32)
    src, dst = np.array([1, 4], np.int32), np.array([5, 2], np.int32)
    out = host(ops["kv_copy"](array(kv), src, dst))
    want = kv.copy()
    want[dst] = kv[src]
    np.testing.assert_array_equal(out, want)


def test_layers(lib, rng):
    ops, array, host = lib
    x, r = rng.standard_normal((2, 5, 16)).astype(np.float32)
    w = rng.standard_normal(16).astype(np.float32)
    norm = (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)) * (1 + w)
    got = ops["rms_norm"](array(x), array(w), 1e-3, 1.0)
    np.testing.assert_allclose(host(got), norm, rtol=1e-5, atol=1e-6)
    fused, total = ops["add_rms_norm"](array(x), array(r), array(w), 1e-3)
    np.testing.assert_allclose(host(total), x + r, rtol=1e-6)
    alone = ops["rms_norm"](array(x + r), array(w), 1e-3)
    np.testing.assert_allclose(host(fused), host(alone), rtol=1e-6)
    silu = x / (1 + np.exp(-x)) * r
    np.testing.assert_allclose(
        host(ops["silu_mul"](array(x), array(r))), silu, rtol=1e-4, atol=1e-6
    )
    gelu = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * r
    np.testing.assert_allclose(
        host(ops["gelu_mul"](array(x), array(r))), gelu, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        host(ops["softcap"](array(x), 0.5)), 0.5 * np.tanh(x / 0.5), rtol=1e-4
    )
    weight = rng.standard_normal((3, 16)).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32)
    got = ops["linear"](array(x), array(weight), array(bias))
    np.testing.assert_allclose(host(got), x @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_silu_of_large_negatives_is_zero_and_quiet(lib):
    ops, array, host = lib
    out = ops["silu_mul"](array(np.float32([-1e4, 1e4])), array(np.float32([1, 1])))
    np.testing.assert_array_equal(host(out), [0, 1e4])


def test_embed_clamps_and_take_rows_takes(lib, rng):
    ops, array, host = lib
    table = rng.standard_normal((6, 4)).astype(np.float32)
    ids = np.array([5, 0, -3, 99], np.int32)
    np.testing.assert_array_equal(host(ops["embed"](array(table), array(ids))), table[[5, 0, 0, 5]])
    rows = np.array([2, 2, 1], np.int32)
    got = ops["take_rows"](array(table), array(rows))
    np.testing.assert_array_equal(host(got), table[rows])


def test_rope_rotates_pairs_of_halves_and_leaves_the_rest(lib, rng):
    ops, array, host = lib
    x = rng.standard_normal((3, 2, 10)).astype(np.float32)
    positions, inv = np.array([0, 5, 70], np.int32), np.float32([1.0, 0.1, 0.01, 0.001])
    table = ops["rope_table"](array(positions), array(inv), 1.5)
    out = host(ops["rope"](array(x), table))
    for t, position in enumerate(positions):
        for i in range(4):
            cos, sin = 1.5 * math.cos(position * inv[i]), 1.5 * math.sin(position * inv[i])
            a, b = x[t, :, i], x[t, :, i + 4]
            np.testing.assert_allclose(out[t, :, i], a * cos - b * sin, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(out[t, :, i + 4], b * cos + a * sin, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[:, :, 8:], x[:, :, 8:])


def test_every_op_has_a_reference_in_float64_too(rng):
    ops = reference_ops(NUMPY, f32=np.float64)
    assert tuple(ops) == OP_NAMES
    x = rng.standard_normal((4, 33)).astype(np.float32)
    exact = x.astype(np.float64) @ x.astype(np.float64).T
    wide = ops["linear"](x.astype(np.float64), x)
    np.testing.assert_allclose(wide, exact, rtol=1e-14)
