"""The engine on interpreted Triton kernels: the embedded default model, token for token."""

import pytest

from leadframe import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 1, 2, 3, 5, 8,"]
SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 32 << 20,
}


def generate(device):
    with LLM(device=device, **SETTINGS) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
        return llm.generate(PROMPTS, greedy)


@pytest.mark.triton_interp
@pytest.mark.slow
def test_greedy_tokens_of_smollm2_are_those_of_the_cpu_backend():
    """Prompts that do not fit one step, so that chunks and decodes share some."""
    found, wanted = generate("cuda:interpreter"), generate("cpu")
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert found[0].token_ids != found[1].token_ids
