"""The engine on interpreted kernels: the embedded default model, token for token."""

import pytest


@pytest.mark.lane
@pytest.mark.timeout(900)
def test_greedy_tokens_of_smollm2_are_those_of_the_cpu_backend(generate_small):
    tokens, wanted = (
        [completion.token_ids for completion in generate_small(device, max_tokens=8)]
        for device in ("tpu:interpreter", "cpu")
    )
    assert tokens == wanted
    assert len(set(map(tuple, tokens))) == 2
