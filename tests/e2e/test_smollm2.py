"""The embedded default model, on the host, against Transformers on the same float32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leadframe import LLM, SamplingParams
from leadframe.models import open_checkpoint

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "La photosynthèse est le processus par lequel",
    "1, 1, 2, 3, 5, 8,",
    "Ingredients: 2 eggs, 100 g flour, a pinch of salt.\nMethod:",
    "SELECT name, COUNT(*) FROM users",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "The three laws of thermodynamics state that " * 8,
    "a",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", kv_cache_memory_bytes=256 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def oracle():
    path = open_checkpoint(None).tokenizer_path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def completions(llm: LLM) -> list:
    return llm.generate(PROMPTS, GREEDY)


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_are_those_of_transformers(completions, oracle) -> None:
    """Teacher-forced: if every argmax agrees on our own text, greedy decoding agrees."""
    assert len({tuple(c.token_ids) for c in completions}) == len(PROMPTS)
    for completion in completions:
        start = len(completion.prompt_token_ids)
        assert len(completion.token_ids) == 64
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        with torch.inference_mode():
            logits = oracle(ids).logits[0, start - 1 : -1]
        assert completion.token_ids == logits.argmax(-1).tolist()
        logprobs = logits.log_softmax(-1)
        for row, entry in zip(logprobs, completion.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            for token, value in entry.top:
                assert value == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.slow
def test_logits_are_within_a_thousandth(llm, oracle) -> None:
    from leadframe.platform.batch import Bucket, StepBatch, packed_sizes, unpack

    ids = llm.tokenizer.encode(PROMPTS[1])
    runner, ops = llm.engine.parts.runner, llm.engine.parts.ops
    model = open_checkpoint(None).model
    block_size = runner._spec.block_size
    count = len(ids)
    bucket = Bucket(count, 1, 0, -(-count // block_size), count, "greedy", num_logprobs=0)
    num_ints, num_floats = packed_sizes(bucket)
    ints = np.zeros(num_ints, np.int32)
    arrays = unpack(bucket, ints, None)
    arrays.query_start[:] = [0, count]
    arrays.seq_lens[:] = count
    arrays.block_table[0] = 1 + np.arange(bucket.num_blocks)
    arrays.slots[:] = block_size + np.arange(count)
    arrays.positions[:] = arrays.logits_idx[:] = np.arange(count)
    arrays.token_ids[:] = ids

    def step(weights, kv, device_arrays):
        hidden, kv = model.forward(ops, weights, kv, device_arrays)
        return {"logits": model.logits(ops, weights, hidden)}, kv

    backend = runner.backend
    kv = backend.kv_alloc(replace(runner._spec), bucket.num_blocks + 1)
    compiled = backend.compile(step, bucket, runner._weights, kv, capture=False)
    batch = StepBatch(bucket, ints, np.zeros(num_floats, np.float32), count, 1, count)
    outputs, kv = compiled.run(batch, kv)
    ours = backend.download(outputs["logits"])
    backend.kv_free(kv)
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"num_blocks_override": 18, "max_model_len": 256, "enable_prefix_caching": False},
    ],
    ids=["small chunks", "preemption, no cache"],
)
def test_the_schedule_changes_nothing_on_real_weights(completions, settings) -> None:
    with LLM(device="cpu", dtype="float32", **settings) as other:
        short = replace(GREEDY, max_tokens=16)
        for _ in range(2):  # the second time the cache is warm, where there is one
            again = other.generate(PROMPTS, short)
            for mine, expected in zip(again, completions, strict=True):
                assert mine.token_ids == expected.token_ids[:16]
        if "num_blocks_override" in settings:
            assert other.engine.metrics.preemptions.value > 0


@pytest.mark.slow
def test_a_chat_is_coherent_and_streams_as_it_completes(llm) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    whole = llm.chat(messages, params)
    assert "Paris" in whole.text
    ids = llm.tokenizer.apply_chat_template(messages)
    assert "".join(o.text for o in llm.stream(ids, params)) == whole.text
