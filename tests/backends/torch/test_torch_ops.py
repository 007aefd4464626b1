"""Layer and sampling ops in plain torch against the oracle."""

import numpy as np
import pytest
import torch

from leadframe.platform import OP_NAMES

DTYPES = {"float32": 3e-6, "bfloat16": 2e-2}


def test_every_op_of_the_contract_is_overridden(backend):
    assert set(backend.ops) == set(OP_NAMES)


@pytest.fixture
def check(backend, oracle):
    """Compares an op with the oracle on the values that the operands round to."""

    def compare(name, *operands, dtype="float32", **extra):
        def up(x):
            is_float = isinstance(x, np.ndarray) and x.dtype == np.float32
            if isinstance(x, tuple):
                return tuple(up(part) for part in x)
            if not isinstance(x, np.ndarray):
                return x
            return backend.upload(x, dtype if is_float else None)

        def down(x):
            if isinstance(x, tuple):
                return tuple(down(part) for part in x)
            return backend.download(x) if isinstance(x, torch.Tensor) else x

        device = [up(x) for x in operands]
        exact = [down(x) for x in device]
        got = backend.ops[name](*device, **extra)
        want = oracle[name](*exact, **extra)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for ours, theirs in pairs:
            if ours is None:
                assert theirs is None
                continue
            host = backend.download(ours)
            scale = max(1.0, float(np.abs(theirs).max()))
            np.testing.assert_allclose(host, theirs, rtol=0, atol=DTYPES[dtype] * scale)

    return compare


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_ops(check, rng, dtype):
    def floats(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, residual = floats(7, 48), floats(7, 48)
    check("linear", x, floats(20, 48), dtype=dtype)
    check("linear", x, floats(20, 48), floats(20), dtype=dtype)
    check("rms_norm", x, floats(48), 1e-5, dtype=dtype)
    check("rms_norm", x, floats(48), 1e-5, 1.0, dtype=dtype)
    check("rms_norm", floats(3, 4, 16), floats(16), 1e-6, dtype=dtype)
    check("add_rms_norm", x, residual, floats(48), 1e-5, 1.0, dtype=dtype)
    check("silu_mul", x * 9, residual, dtype=dtype)
    check("gelu_mul", x * 9, residual, dtype=dtype)
    check("softcap", x * 50, 30.0, dtype=dtype)
    check("take_rows", x, np.array([6, 0, 0, 3], np.int32), dtype=dtype)
    check("embed", floats(11, 6), np.array([0, 10, -5, 99], np.int32), dtype=dtype)


def test_rotation(check, backend, rng):
    x = rng.standard_normal((5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 13, 20, 5], np.int32)  # float32 angles lose digits
    for rotated in (16, 8):  # all of a head, and half of it
        inv_freq = (10000.0 ** -(np.arange(rotated // 2) / (rotated // 2))).astype(np.float32)
        check("rope_table", positions, inv_freq, 1.5)
        table = backend.ops["rope_table"](torch.from_numpy(positions), torch.from_numpy(inv_freq))
        check("rope", x, tuple(backend.download(part) for part in table))


def test_collectives_of_one_rank_are_the_identity(backend):
    x = torch.randn(3)
    assert backend.ops["all_reduce"](x) is x
    assert backend.ops["all_gather"](x) is x


def _rows(rng, num, vocab, spread=4.0):
    return (rng.standard_normal((num, vocab)) * spread).astype(np.float32)


def _settings(rng, num):
    return (
        rng.choice([0.0, 0.7, 1.0, 1.3], num).astype(np.float32),
        (rng.integers(0, 2**24, num) / 2**24).astype(np.float32),
        rng.choice([0.0, 0.05], num).astype(np.float32),
        rng.choice([0, 1, 5, 40], num).astype(np.int32),
        rng.choice([1.0, 0.9, 0.5], num).astype(np.float32),
    )


@pytest.mark.parametrize("variant", ["plain", "threshold", "sort"])
def test_draws_are_the_references(backend, oracle, rng, variant):
    logits = _rows(rng, 200, 3000)
    settings = _settings(rng, 200)
    got = backend.ops["sample"](*map(torch.from_numpy, (logits, *settings)), variant)
    want = oracle["sample"](logits, *settings, variant)
    np.testing.assert_array_equal(got[1].numpy(), want[1])
    # rounding may move a draw to its neighbour where the target falls on a boundary
    assert (got[0].numpy() == want[0]).mean() > 0.985


def test_flat_rows_are_not_covered_by_candidates(backend):
    logits = torch.zeros(2, 4000)
    logits[0, :50] = 30.0
    ones, off = torch.ones(2), torch.zeros(2)
    tokens, covered = backend.ops["sample"](
        logits, ones, ones / 2, off, off.int(), ones * 0.9, "threshold"
    )
    assert covered.tolist() == [True, False]
    _, sorted_ = backend.ops["sample"](logits, ones, ones / 2, off, off.int(), ones * 0.9, "sort")
    assert sorted_.all()
    assert tokens.dtype == torch.int32


def test_the_last_uniform_never_draws_a_dropped_token(backend):
    logits = torch.full((64, 300), -1e4)
    logits[:, 7] = torch.linspace(0, 3, 64)
    logits[:, 100] = 1.0
    ones = torch.ones(64)
    tokens, _ = backend.ops["sample"](
        logits, ones, ones - 2.0**-24, ones * 0.01, None, None, "plain"
    )
    assert set(tokens.tolist()) <= {7, 100}


def test_logprobs_and_ranks(check, rng):
    logits = _rows(rng, 6, 50)
    targets = np.array([0, 49, 3, 3, 7, 1], np.int32)
    check("topk_logprobs", logits, targets, 5)
    check("topk_logprobs", logits, targets, 0)


def test_edits(check, rng):
    logits = _rows(rng, 3, 12)
    ids = np.array([[0, 4, 4], [1, 2, 11], [5, 6, 7]], np.int32)
    scale = np.array([[2, 1.5, 1.5], [1, 1, 1], [1, 3, 1]], np.float32)
    add = np.array([[0, -1, -1], [-np.inf, 0.5, 0], [0, 0, 2]], np.float32)
    keep_only = np.array([0, 0, 1], np.int32)
    got = torch.from_numpy(logits.copy())
    import leadframe_torch.sampling_ops as ops

    result = ops.edit_logits(got, *map(torch.from_numpy, (ids, scale, add, keep_only)))
    assert result is got
    want = logits.copy()
    want[0, 0] = logits[0, 0] / 2 if logits[0, 0] > 0 else logits[0, 0] * 2
    want[0, 4] = (logits[0, 4] / 1.5 if logits[0, 4] > 0 else logits[0, 4] * 1.5) - 1
    want[1, 1], want[1, 2] = -np.inf, logits[1, 2] + 0.5
    want[2] = -np.inf
    want[2, 5], want[2, 7] = logits[2, 5], logits[2, 7] + 2
    want[2, 6] = logits[2, 6] / 3 if logits[2, 6] > 0 else logits[2, 6] * 3
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_masks_are_the_references_and_in_place(backend, oracle):
    rng = np.random.default_rng(3)
    for vocab in (31, 64, 1000):
        logits = rng.standard_normal((5, vocab)).astype(np.float32)
        mask = rng.integers(-(2**31), 2**31, (5, -(-vocab // 32))).astype(np.int32)
        mask[:, 0] &= ~4
        got = torch.from_numpy(logits.copy())
        packed = torch.from_numpy(np.concatenate([[7], mask.reshape(-1)]).astype(np.int32))
        result = backend.ops["mask_logits"](got, packed[1:].reshape(mask.shape))
        assert result is got
        np.testing.assert_array_equal(got.numpy(), oracle["mask_logits"](logits, mask))


def test_argmax_takes_the_first_and_finite_rows_sees_each_kind(backend):
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 5.0]])
    assert backend.ops["argmax"](logits).tolist() == [1, 0]
    assert backend.ops["argmax"](logits).dtype == torch.int32
    bad = torch.tensor([[0.0, 1.0], [np.nan, 0.0], [np.inf, 0.0], [-np.inf, 0.0]])
    assert backend.ops["finite_rows"](bad).tolist() == [True, False, False, False]
