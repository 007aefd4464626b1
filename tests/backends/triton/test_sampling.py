"""The sampling kernels in Triton's interpreter, against torch's ops and written-out draws."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.triton_interp

STEP = 2.0**-24


@pytest.fixture
def draw():
    from leadframe_triton.arch import INTERPRETER
    from leadframe_triton.launch import LaunchContext
    from leadframe_triton.sampling import sample

    def run(logits, temperature=1.0, uniform=0.5, min_p=0.0, top_k=0, top_p=1.0, how="plain"):
        rows = logits.shape[0]
        floats = [torch.as_tensor(x).float().expand(rows) for x in (temperature, uniform, min_p, top_p)]  # fmt: skip  # noqa: E501
        temperature, uniform, min_p, top_p = (x.contiguous() for x in floats)
        k = torch.as_tensor(top_k, dtype=torch.int32).expand(rows).contiguous()
        return sample(
            LaunchContext(INTERPRETER), logits, temperature, uniform, min_p, k, top_p, how
        )

    return run


@pytest.mark.parametrize("vocab", [7, 130, 5000])
@pytest.mark.parametrize("how", ["plain", "threshold", "sort"])
def test_draws_are_those_of_the_torch_ops(draw, vocab, how):
    from leadframe_torch import sampling_ops

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(10, vocab, generator=generator) * 3
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    uniform = torch.randint(0, 2**24, (10,), generator=generator) * STEP
    min_p = torch.tensor([0, 0, 0, 0.2, 0.2, 0, 0, 0, 0, 0.0])
    top_k = torch.tensor([0, 0, 0, 0, 3, 3, 1, 2000, 0, 0], dtype=torch.int32)
    top_p = torch.tensor([1, 1, 1, 1, 1, 0.9, 1, 1, 0.5, 0.9999])
    token, covered = draw(logits, temperature, uniform, min_p, top_k, top_p, how)
    want = sampling_ops.sample(logits, temperature, uniform, min_p, top_k, top_p, how)
    assert token.tolist() == want[0].tolist()
    assert covered.tolist() == want[1].tolist()


def test_flat_rows_are_not_covered_by_the_candidates(draw):
    _, covered = draw(torch.zeros(1, 3000) + torch.arange(3000) * 1e-6, top_p=0.9, how="threshold")
    assert not covered.item()
    _, covered = draw(torch.zeros(1, 3000) + torch.arange(3000) * 1e-6, top_p=0.9, how="sort")
    assert covered.item()


def test_top_k_may_take_every_candidate(draw):
    logits = torch.arange(1500.0).unsqueeze(0) * 1e-3
    token, covered = draw(logits, uniform=0.0, top_k=1024, how="threshold")
    assert (token.item(), covered.item()) == (1500 - 1024, True)


def test_equal_logits_stay_together(draw):
    logits = torch.tensor([[2.0, 2.0, 2.0, 1.0]])
    drawn = {draw(logits, uniform=u, top_k=1, how="sort")[0].item() for u in (0.0, 0.4, 0.9)}
    assert drawn == {0, 1, 2}


def test_the_ends_of_the_unit_interval(draw):
    logits = torch.full((1, 9000), -30.0)
    logits[0, 4000] = logits[0, 5000] = 0.0
    low = draw(logits, uniform=0.0, min_p=0.5)[0].item()
    high = draw(logits, uniform=1 - STEP, min_p=0.5)[0].item()
    assert (low, high) == (4000, 5000), "never a token that min_p dropped"


def test_shares_of_draws_follow_the_probabilities(draw):
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(64, 4).contiguous()
    uniform = (torch.arange(64) + 0.5) / 64
    counts = torch.bincount(draw(logits, uniform=uniform)[0], minlength=4)
    assert counts.tolist() == [32, 16, 8, 8]


def test_argmax_takes_the_first_of_equals(context):
    from leadframe_triton.sampling import argmax

    logits = torch.zeros(3, 9000)
    logits[0, [5, 8500]] = 1.0
    logits[1, 8999] = 1.0
    logits[2] = -7.0
    assert argmax(context, logits).tolist() == [5, 8999, 0]


def test_a_row_has_the_same_bits_alone(context):
    from leadframe_triton.sampling import topk_logprobs

    logits, targets = torch.randn(5, 5000), torch.arange(5, dtype=torch.int32)
    whole = topk_logprobs(context, logits, targets, 3)
    for row in range(5):
        part = slice(row, row + 1)
        alone = topk_logprobs(context, logits[part], targets[part], 3)
        assert all(torch.equal(a, w[part]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs(context, k):
    from leadframe_triton.sampling import topk_logprobs

    logits = torch.randn(4, 5000) * 4
    logits[1, 7] = logits[1].max() + 1
    targets = torch.tensor([3, 7, 4999, -1], dtype=torch.int32)
    logprob, rank, ids, values = topk_logprobs(context, logits, targets, k)
    exact = logits.double().log_softmax(-1)
    columns = targets.long().clamp(min=0).unsqueeze(1)
    torch.testing.assert_close(logprob.double(), exact.gather(1, columns)[:, 0], rtol=0, atol=5e-6)
    assert rank[1].item() == 1
    above = (logits > logits.gather(1, columns)).sum(-1) + 1
    assert rank.tolist() == above.tolist()
    if k:
        best, place = exact.topk(k)
        assert ids.tolist() == place.tolist()
        torch.testing.assert_close(values.double(), best, rtol=0, atol=5e-6)
    else:
        assert ids is None
        assert values is None
