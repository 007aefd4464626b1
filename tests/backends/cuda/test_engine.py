"""The engine on interpreted Triton kernels: the embedded default model, token for token."""

import pytest


@pytest.mark.triton_interp
@pytest.mark.slow
def test_greedy_tokens_of_smollm2_are_those_of_the_cpu_backend(generate_small):
    """Prompts that do not fit one step, so that chunks and decodes share some."""
    asked = {"max_tokens": 5, "logprobs": 0}
    found, wanted = generate_small("cuda:interpreter", **asked), generate_small("cpu", **asked)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert found[0].token_ids != found[1].token_ids
