"""The engine on interpreted kernels: the embedded default model, token for token."""

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
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return [completion.token_ids for completion in llm.generate(PROMPTS, greedy)]


@pytest.mark.lane
@pytest.mark.timeout(900)
def test_greedy_tokens_of_smollm2_are_those_of_the_cpu_backend():
    tokens = generate("tpu:interpreter")
    assert tokens == generate("cpu")
    assert len(set(map(tuple, tokens))) == 2
