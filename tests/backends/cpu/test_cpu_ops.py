"""Native layer and sampling ops against the oracle."""

import numpy as np
import pytest
import torch

from leadframe.platform import OP_NAMES

DTYPES = {"float32": 2e-6, "bfloat16": 2e-2}


def test_every_op_of_the_contract_is_there(native, plain):
    assert set(native.ops) == set(plain.ops) == set(OP_NAMES)
    assert native.native_reason == ""
    assert "native=off" in plain.native_reason


@pytest.fixture
def check(native, oracle):
    """Compares an op with the oracle on the values that the operands round to."""

    def compare(name, *operands, dtype="float32"):
        def up(x):
            if not isinstance(x, np.ndarray):
                return tuple(map(up, x)) if isinstance(x, tuple) else x
            return native.upload(x, dtype if x.dtype == np.float32 else None)

        def down(x):
            if isinstance(x, tuple):
                return tuple(map(down, x))
            return native.download(x) if isinstance(x, torch.Tensor) else x

        device = [up(x) for x in operands]
        got, want = native.ops[name](*device), oracle[name](*map(down, device))
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for ours, theirs in pairs:
            scale = max(1.0, float(np.abs(theirs).max()))
            atol = DTYPES[dtype] * scale
            np.testing.assert_allclose(native.download(ours), theirs, rtol=0, atol=atol)

    return compare


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 37, 576])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rows_of_any_width(check, rng, dtype, width, rows):
    def floats(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, y = floats(rows, width), floats(rows, width)
    check("rms_norm", x, floats(width), 1e-5, dtype=dtype)
    check("rms_norm", x * 1e-4, floats(width), 1e-5, 1.0, dtype=dtype)
    check("add_rms_norm", x, y, floats(width), 1e-5, 1.0, dtype=dtype)
    check("silu_mul", x * 30, y, dtype=dtype)
    check("gelu_mul", x * 30, y, dtype=dtype)
    check("softcap", x * 90, 30.0, dtype=dtype)
    check("take_rows", x, np.array([rows - 1, 0, 0], np.int32), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 80), (64, 16), (40, 20), (256, 256)])
def test_rotation(native, check, rng, dtype, dim, rotated):
    x = rng.standard_normal((50, 3, dim)).astype(np.float32)
    positions = rng.integers(0, 30, 50).astype(np.int32)
    half = rotated // 2
    inv_freq = (10000.0 ** -(np.arange(half) / half)).astype(np.float32)
    check("rope_table", positions, inv_freq, 1.5)
    table = native.ops["rope_table"](torch.from_numpy(positions), torch.from_numpy(inv_freq))
    wide = tuple(part.double().numpy() for part in table)
    array = native.upload(x, dtype)
    got = native.download(native.ops["rope"](array, table))
    low, high = (native.download(array)[..., at : at + half] for at in (0, half))
    cos, sin = (part[:, None] for part in wide)
    tolerance = DTYPES[dtype] * 4
    np.testing.assert_allclose(got[..., :half], low * cos - high * sin, atol=tolerance)
    np.testing.assert_allclose(got[..., half:rotated], high * cos + low * sin, atol=tolerance)
    np.testing.assert_array_equal(got[..., rotated:], native.download(array)[..., rotated:])


def test_extreme_activations_stay_finite(native):
    x = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, 3.0]])
    ones = torch.ones_like(x)
    torch.testing.assert_close(native.ops["silu_mul"](x, ones), torch.nn.functional.silu(x))
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(native.ops["gelu_mul"](x, ones), gelu)
    nan = native.ops["silu_mul"](torch.full((1, 5), torch.nan), torch.ones(1, 5))
    assert nan.isnan().all()


def test_mixed_types_go_to_torch(native):
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    out = native.ops["rms_norm"](x, weight, 1e-5)
    want = torch.nn.functional.rms_norm(x.float(), (8,), weight, 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
    assert native.ops["silu_mul"](torch.zeros(2).double(), torch.zeros(2).double()).dtype == (
        torch.float64
    )


# --- sampling ------------------------------------------------------------------------------


def _rows(rng, num, vocab, spread=4.0):
    return (rng.standard_normal((num, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49153])
def test_argmax_takes_the_first_largest(native, rng, vocab):
    logits = rng.integers(0, 50, (9, vocab)).astype(np.float32)
    got = native.ops["argmax"](torch.from_numpy(logits))
    np.testing.assert_array_equal(got.numpy(), logits.argmax(axis=1))
    low = native.ops["argmax"](torch.from_numpy(logits).bfloat16())
    np.testing.assert_array_equal(low.numpy(), logits.argmax(axis=1))
    assert got.dtype == torch.int32


@pytest.mark.parametrize("at", [0, 7, 16, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_logit_is_seen(native, at, bad):
    logits = torch.zeros(3, 21)
    logits[1, at] = bad
    assert native.ops["finite_rows"](logits).tolist() == [True, False, True]
    assert native.ops["finite_rows"](logits.bfloat16()).tolist() == [True, False, True]


def _settings(rng, num):
    return (
        rng.choice([0.0, 0.7, 1.0, 1.3], num).astype(np.float32),
        (rng.integers(0, 2**24, num) / 2**24).astype(np.float32),
        rng.choice([0.0, 0.05], num).astype(np.float32),
        rng.choice([0, 1, 5, 40, 2000, 9000], num).astype(np.int32),
        rng.choice([1.0, 0.9, 0.5, 0.01], num).astype(np.float32),
    )


@pytest.mark.parametrize("variant", ["plain", "threshold", "sort"])
@pytest.mark.parametrize(("vocab", "spread"), [(3000, 4.0), (3000, 0.3), (500, 2.0)])
def test_draws_are_the_oracles(native, oracle, rng, variant, vocab, spread):
    logits = _rows(rng, 150, vocab, spread)
    settings = _settings(rng, 150)
    got = native.ops["sample"](*map(torch.from_numpy, (logits, *settings)), variant)
    want = oracle["sample"](logits, *settings, variant)
    np.testing.assert_array_equal(got[1].numpy(), want[1])
    # float32 weights may move a draw whose target falls on a boundary
    assert (got[0].numpy() == want[0]).mean() > 0.985
    if variant == "threshold" and vocab > 1024 and spread < 1:
        assert not want[1].all()


def test_draws_follow_the_probabilities(native):
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.5]]).log_softmax(-1).repeat(20000, 1)
    uniform = torch.arange(20000) / 20000
    ones, off = torch.ones(20000), torch.zeros(20000)
    tokens, _ = native.ops["sample"](logits, ones, uniform, off, None, None, "plain")
    share = torch.bincount(tokens.long(), minlength=4) / 20000
    torch.testing.assert_close(share, logits[0].exp(), atol=2e-4, rtol=0)


def test_the_last_uniform_never_draws_a_dropped_token(native):
    logits = torch.full((64, 300), -1e4)
    logits[:, 7], logits[:, 100] = torch.linspace(0, 3, 64), 1.0
    ones = torch.ones(64)
    for uniform in (ones - 2.0**-24, ones):  # 1 is out of range, and must be harmless
        draw = (logits, ones, uniform, ones * 0.01, None, None, "plain")
        assert set(native.ops["sample"](*draw)[0].tolist()) <= {7, 100}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", ["plain", "threshold", "sort"])
def test_bad_logits_neither_crash_nor_leave_the_vocabulary(native, rng, poison, variant):
    logits = _rows(rng, 8, 2000)
    logits[::2, rng.integers(0, 2000, 500)] = poison
    logits[4] = poison
    settings = _settings(rng, 8)
    tensors = tuple(map(torch.from_numpy, (logits, *settings)))
    tokens, _ = native.ops["sample"](*tensors, variant)
    assert ((tokens >= 0) & (tokens < 2000)).all()
    native.ops["topk_logprobs"](tensors[0], torch.zeros(8, dtype=torch.int32), 20)
    clean = native.ops["sample"](*(x[1::2].contiguous() for x in tensors), variant)[0]
    assert torch.equal(tokens[1::2], clean)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_and_ranks(check, rng, k):
    logits = _rows(rng, 6, 501)
    targets = np.array([0, 500, 3, 3, 7, 999], np.int32)
    if k:
        check("topk_logprobs", logits, targets, k)
    else:
        import torch as t

        logprob, rank, ids, top = _logprobs_without_top(logits, targets)
        exact = t.from_numpy(logits).double().log_softmax(-1)
        chosen = exact.gather(1, t.from_numpy(targets).long().clamp(0, 500)[:, None])
        t.testing.assert_close(logprob.double(), chosen[:, 0], atol=1e-5, rtol=0)
        assert rank.tolist() == (1 + (exact > chosen).sum(1)).tolist()
        assert ids is None
        assert top is None


def _logprobs_without_top(logits, targets):
    from leadframe_cpu.backend import CpuBackend

    backend = CpuBackend(threads=3, native="on")
    return backend.ops["topk_logprobs"](torch.from_numpy(logits), torch.from_numpy(targets), 0)


def test_more_best_than_tokens_is_refused(native):
    with pytest.raises(RuntimeError, match="out of range"):
        native.ops["topk_logprobs"](torch.zeros(1, 3), torch.zeros(1, dtype=torch.int32), 5)


def test_edits_are_torchs(native, plain, rng):
    logits = torch.from_numpy(_rows(rng, 4, 40))
    ids = torch.tensor([[0, 4, 4], [1, 2, 39], [5, 6, 7], [-1, 60, 3]], dtype=torch.int32)
    scale = torch.tensor([[2, 1.5, 1.5], [1, 1, 1], [1, 3, 1], [1, 1, 1]])
    add = torch.tensor([[0, -1, -1], [-torch.inf, 0.5, 0], [0, 0, 2], [1, 2, 3]])
    keep_only = torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    want = plain.ops["edit_logits"](logits.clone(), ids, scale, add, keep_only)
    mine = logits.clone()
    assert native.ops["edit_logits"](mine, ids, scale, add, keep_only) is mine
    assert torch.equal(mine, want)


def test_the_last_candidate_may_stand_far_from_the_others(native, oracle):
    logits = np.full((1, 3000), -40.0, np.float32)
    logits[0, :1023], logits[0, 2999] = 5.0, 4.0
    one = np.ones(1, np.float32)
    settings = (one, one * (1 - 2.0**-24), one * 0, np.array([1024], np.int32), one)
    got = native.ops["sample"](*map(torch.from_numpy, (logits, *settings)), "threshold")
    want = oracle["sample"](logits, *settings, "threshold")
    assert (got[0].tolist(), got[1].tolist()) == ([2999], [True])
    assert want[0].tolist() == [2999]
