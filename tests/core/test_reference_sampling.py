"""The reference sampler against a plain sampler that sorts everything."""

import array_api_strict
import numpy as np
import pytest

from leadframe.platform import reference_ops
from leadframe.platform.reference.namespace import numpy_namespace

OPS = reference_ops(numpy_namespace())


def _plain_draw(logits, temperature, u, min_p, top_k, top_p):
    """One row in float64, by the definition."""
    if temperature == 0:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    keep = p >= min_p * p.max()
    if top_k:
        keep &= p >= np.sort(p)[::-1][min(top_k, len(p)) - 1]
    rest = np.where(keep, p, 0) / p[keep].sum()
    if top_p < 1:
        mass = np.cumsum(np.sort(rest)[::-1])
        keep &= rest >= np.sort(rest)[::-1][min(np.sum(mass < top_p), len(p) - 1)]
    cdf = np.cumsum(np.where(keep, p, 0))
    return int(np.argmax(cdf > u * cdf[-1]))


def _rows(rng, n, vocab):
    return {
        "logits": (rng.standard_normal((n, vocab)) * 3).astype(np.float32),
        "temperature": rng.choice(np.float32([0, 0.5, 1, 1.5]), n),
        "uniform": (rng.integers(0, 2**24, n) * 2.0**-24).astype(np.float32),
        "min_p": rng.choice(np.float32([0, 0.02, 0.2]), n),
        "top_k": rng.choice(np.int32([0, 1, 5, 40, 5000]), n),
        "top_p": rng.choice(np.float32([1, 0.95, 0.5, 0.01]), n),
    }


@pytest.mark.parametrize("vocab", [7, 128, 1000, 3001])
@pytest.mark.parametrize("variant", ["plain", "threshold", "sort"])
def test_draws_match_the_definition(vocab, variant):
    rows = _rows(np.random.default_rng(vocab), 64, vocab)
    if variant == "plain":
        rows["top_k"][:], rows["top_p"][:] = 0, 1
    tokens, covered = OPS["sample"](**rows, variant=variant)
    want = np.array(
        [
            _plain_draw(
                *(
                    rows[name][i].astype(np.float64) if name != "top_k" else rows[name][i]
                    for name in rows
                )
            )
            for i in range(64)
        ]
    )
    assert tokens.dtype == np.int32
    assert (tokens == want)[covered].mean() > 0.98  # a draw on a float32 boundary may differ
    assert covered.all() or (variant == "threshold" and vocab > 1024)


def test_threshold_says_which_rows_need_the_sort():
    flat = np.zeros((3, 4000), np.float32)
    flat[:, :] = np.linspace(0, 0.01, 4000)
    one, off = np.ones(3, np.float32), np.zeros(3, np.float32)
    top_k, top_p = np.int32([2000, 0, 10]), np.float32([1, 0.9, 0.9])
    _, covered = OPS["sample"](flat, one, one * 0.5, off, top_k, top_p, "threshold")
    np.testing.assert_array_equal(covered, [False, False, True])
    _, covered = OPS["sample"](flat, one, one * 0.5, off, top_k, top_p, "sort")
    assert covered.all()


def test_the_largest_uniform_never_draws_a_dropped_token():
    rng = np.random.default_rng(3)
    n, vocab = 200, 1537
    logits = (rng.standard_normal((n, vocab)) * 4).astype(np.float32)
    logits[:, rng.integers(0, vocab, 700)] = -np.inf
    uniform = np.full(n, 1 - 2.0**-24, np.float32)
    one, off = np.ones(n, np.float32), np.zeros(n, np.float32)
    min_p = np.full(n, 1e-3, np.float32)
    for variant in ("plain", "threshold", "sort"):
        tokens, _ = OPS["sample"](logits, one, uniform, min_p, off.astype(np.int32), one, variant)
        drawn = logits[np.arange(n), tokens]
        assert (drawn >= logits.max(1) + np.log(1e-3) - 1e-5).all()
    tokens, _ = OPS["sample"](logits, one, off, off, off.astype(np.int32), one, "plain")
    assert np.isfinite(logits[np.arange(n), tokens]).all()


def test_rows_that_are_not_finite_still_give_an_id_in_range():
    logits = np.float32([[np.nan] * 5, [1, np.nan, 2, 3, 4], [-np.inf] * 5, [1, 2, np.inf, 0, 0]])
    one = np.ones(4, np.float32)
    with np.errstate(all="ignore"):
        for variant in ("plain", "threshold", "sort"):
            tokens, _ = OPS["sample"](
                logits, one, one * 0.5, one * 0, np.int32([2] * 4), one * 0.5, variant
            )
            assert ((tokens >= 0) & (tokens < 5)).all()
    np.testing.assert_array_equal(OPS["finite_rows"](logits), [False] * 4)


def test_edits_scale_by_sign_then_add_and_mask():
    logits = np.float32([[2, -2, 1, 0], [2, -2, 1, 0], [1, 2, 3, 4]])
    ids = np.int32([[0, 1, 1], [0, 1, 1], [3, 0, 0]])
    scale = np.float32([[2, 2, 2], [2, 2, 2], [1, 1, 1]])
    add = np.float32([[0.5, 0, 0], [0.5, 0, 0], [-np.inf, 0, 0]])
    out = OPS["edit_logits"](logits.copy(), ids, scale, add, np.int32([0, 1, 0]))
    want = [[1.5, -4, 1, 0], [1.5, -4, -np.inf, -np.inf], [1, 2, 3, -np.inf]]
    np.testing.assert_array_equal(out, np.float32(want))


def test_logprobs_and_ranks():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 50)).astype(np.float32)
    logits[0, 3] = logits[0, 4] = 9.0
    targets = np.int32([4, 1, 2, 3, 49, 0])
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    logprob, rank, ids, best = OPS["topk_logprobs"](logits, targets, 5)
    np.testing.assert_allclose(logprob, exact[np.arange(6), targets], rtol=1e-5)
    assert rank[0] == 1
    np.testing.assert_array_equal(
        rank[1:], 1 + (exact[1:] > exact[np.arange(1, 6), targets[1:], None]).sum(1)
    )
    np.testing.assert_allclose(best, -np.sort(-exact)[:, :5], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(exact, ids.astype(int), 1), best, rtol=1e-5)
    assert OPS["topk_logprobs"](logits, targets, 0)[2:] == (None, None)


def test_the_sampler_stays_inside_the_array_api_standard(strict_namespace):
    ops = reference_ops(strict_namespace)
    rows = _rows(np.random.default_rng(1), 16, 1500)
    strict = {name: array_api_strict.asarray(value) for name, value in rows.items()}
    for variant in ("plain", "threshold", "sort"):
        want, _ = OPS["sample"](**rows, variant=variant)
        got, _ = ops["sample"](**strict, variant=variant)
        np.testing.assert_array_equal(np.array(got._array), want)
    logits = strict["logits"]
    tokens = ops["argmax"](logits)
    np.testing.assert_array_equal(np.array(tokens._array), OPS["argmax"](rows["logits"]))
    np.testing.assert_array_equal(np.array(ops["finite_rows"](logits)._array), [True] * 16)
    _, rank, _, _ = ops["topk_logprobs"](logits, tokens, 3)
    np.testing.assert_array_equal(np.array(rank._array), [1] * 16)
    ids = array_api_strict.asarray(np.int32([[1, 2]] * 16))
    one = array_api_strict.asarray(np.ones((16, 2), np.float32))
    keep = array_api_strict.asarray(np.zeros(16, np.int32))
    edited = ops["edit_logits"](logits, ids, one, one, keep)
    np.testing.assert_allclose(np.array(edited._array)[:, 1], rows["logits"][:, 1] + 1)
