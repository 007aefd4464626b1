"""Layers and heads as programs of their own: the same outputs, shared, and counted once."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from leadframe import SamplingParams
from leadframe.errors import DeviceOOM
from leadframe.platform import Bucket, Limits, build_op_table
from leadframe.platform.batch import unpack
from leadframe.runner.profile import full_batch
from leadframe.runner.step import ModelStep
from leadframe_tpu.create import create_backend
from leadframe_tpu.detect import INTERPRETED
from leadframe_tpu.program import compile_lowered

VOCAB, WIDTH, WORDS = 2000, 16, 63
MIXED = Bucket(32, 4, 0, 2, 4)
DECODE = Bucket(4, 4, 4, 2, 4)


class Lookup:
    """A model whose hidden states are rows of a table; counts how often it is traced."""

    def __init__(self):
        self.traced = {"forward": 0, "logits": 0}

    def forward(self, ops, weights, kv, arrays):
        self.traced["forward"] += 1
        return ops.embed(weights["table"], arrays.token_ids), kv

    def logits(self, ops, weights, rows):
        self.traced["logits"] += 1
        return ops.linear(rows, weights["table"])


@pytest.fixture
def backend():
    made = create_backend(INTERPRETED, {}, Limits())
    yield made
    made.close()


@pytest.fixture
def weights(backend):
    table = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    return {"table": backend.upload(table)}


@pytest.fixture
def model():
    return Lookup()


@pytest.fixture
def step(backend, model):
    return ModelStep(model, build_op_table(backend))


def batch_of(bucket, seed=1):
    """Every row live, of random tokens; scored rows follow the sampled ones."""
    rng = np.random.default_rng(seed)
    batch = full_batch(bucket, 16)
    arrays = unpack(bucket, batch.ints, batch.floats)
    arrays.token_ids[:] = rng.integers(0, VOCAB, bucket.num_tokens)
    arrays.logits_idx[:] = rng.integers(0, bucket.num_tokens, bucket.num_logits)
    for name in ("targets", "edit_ids"):
        if getattr(arrays, name) is not None:
            getattr(arrays, name)[:] = rng.integers(0, VOCAB, getattr(arrays, name).shape)
    for name in ("uniform", "edit_add"):
        if getattr(arrays, name) is not None:
            getattr(arrays, name)[:] = rng.random(getattr(arrays, name).shape)
    if arrays.top_k is not None:
        arrays.top_k[:], arrays.top_p[:] = 7, 0.9
    if arrays.token_mask is not None:
        arrays.token_mask[:] = rng.integers(-(1 << 31), 1 << 31, arrays.token_mask.shape)
    return batch


BUCKETS = {
    "greedy": MIXED,
    "decode": DECODE,
    "plain": replace(MIXED, sample="plain"),
    "threshold": replace(MIXED, sample="threshold"),
    "sort": replace(MIXED, sample="sort"),
    "edits": replace(DECODE, sample="plain", num_edits=16),
    "mask": replace(DECODE, num_mask_words=WORDS),
    "log-probabilities": replace(MIXED, num_logprobs=5),
    "scored": replace(MIXED, num_logits=4 + 8, num_logprobs=0, sample="threshold"),
    "all": replace(MIXED, num_logits=6, num_logprobs=5, num_edits=16, num_mask_words=WORDS),
    "nothing": replace(MIXED, num_logits=0, sample="skip"),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_the_outputs_are_those_of_the_whole_step(backend, step, weights, name):
    batch = batch_of(BUCKETS[name])
    apart = backend.compile(step, batch.bucket, weights, [])
    whole = backend.compile(lambda *args: step(*args), batch.bucket, weights, [])
    outputs, wanted = (s.run(batch, [])[0] for s in (apart, whole))
    assert set(outputs) == set(wanted)
    for key, value in wanted.items():
        np.testing.assert_array_equal(backend.download(outputs[key]), backend.download(value), key)


def test_ways_to_sample_share_the_layers_and_tokens_share_the_head(backend, step, weights, model):
    ways = ["greedy", "plain", "threshold"]
    buckets = [
        replace(MIXED, num_tokens=tokens, num_blocks=width, sample=way)
        for tokens in (64, 32)  # the most hidden states first: they count as scratch
        for width in (2, 8)
        for way in ways
    ]
    steps = [backend.compile(step, bucket, weights, []) for bucket in (*buckets, DECODE)]
    assert model.traced == {"forward": 5, "logits": 3}
    made = [int(s.compile_seconds > 0) for s in steps]
    assert made == [1, 1, 1, *(1, 0, 0) * 3, 1]
    assert [s.bytes for s, is_made in zip(steps, made, strict=True) if not is_made] == [0] * 6
    assert {s.cache_hit for s in steps} == {None}  # there is no cache


def test_scored_rows_have_a_head_of_their_own(backend, step, weights, model):
    scored = replace(MIXED, num_logits=12, num_logprobs=0)
    for tokens in (32, 64):
        backend.compile(step, replace(scored, num_tokens=tokens), weights, [])
    assert model.traced == {"forward": 2, "logits": 2}


def test_other_weights_share_nothing(backend, step, weights, model):
    for given in (weights, {"table": backend.upload(np.ones((100, WIDTH), np.float32))}):
        compiled = backend.compile(step, MIXED, given, [])
        compiled.run(batch_of(MIXED), [])
    assert model.traced == {"forward": 2, "logits": 2}


def test_a_step_that_is_closed_leaves_the_others_what_they_share(backend, step, weights, model):
    first = backend.compile(step, MIXED, weights, [])
    other = backend.compile(step, replace(MIXED, sample="plain"), weights, [])
    first.close()
    first.close()
    outputs, _ = other.run(batch_of(replace(MIXED, sample="plain")), [])
    assert set(outputs) == {"tokens", "covered", "finite"}
    other.close()
    backend.compile(step, MIXED, weights, [])
    assert model.traced["forward"] == 2, "nobody held the layers"


def test_programs_that_wait_are_dropped_with_their_last_step(
    backend, step, weights, model, monkeypatch
):
    may_end = threading.Event()

    def wait(*args):
        may_end.wait(60)
        return compile_lowered(*args)

    monkeypatch.setattr("leadframe_tpu.steps.compile_lowered", wait)
    monkeypatch.setattr(backend._compilers, "_max_workers", 1)
    backend.compile(lambda w, kv, a: ({}, kv), DECODE, {}, [])  # occupies the compiler
    steps = [
        backend.compile(step, replace(MIXED, sample=way), weights, [])
        for way in ("greedy", "plain")
    ]
    layers, heads = steps[0]._held[0]._pending, [s._held[1]._pending for s in steps]
    steps[0].close()
    assert [layers.cancelled(), *(head.cancelled() for head in heads)] == [False, True, False]
    steps[1].close()
    assert layers.cancelled()
    may_end.set()


def test_a_program_that_failed_is_not_shared(backend, step, weights, monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 1G.")

    with monkeypatch.context() as patched:
        patched.setattr("leadframe_tpu.steps.compile_lowered", fail)
        first = backend.compile(step, MIXED, weights, [])
        with pytest.raises(DeviceOOM, match="during compile"):
            first.bytes  # noqa: B018
    second = backend.compile(step, MIXED, weights, [])
    assert set(second.run(batch_of(MIXED), [])[0]) == {"tokens", "finite"}


def test_a_head_that_fails_leaves_a_cache_to_go_on_with(backend, step, weights, monkeypatch):
    class Full:
        memory = None

        def compiled(self, *args):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 1G.")

    compiled = backend.compile(step, MIXED, weights, [backend.upload(np.zeros(4, np.float32))])
    kv = [backend.upload(np.zeros(4, np.float32))]
    compiled.bytes  # noqa: B018
    head = compiled._programs[1]
    compiled._programs[1] = Full()
    with pytest.raises(DeviceOOM, match="during step"):
        compiled.run(batch_of(MIXED), kv)
    compiled._programs[1] = head
    outputs, kv = compiled.run(batch_of(MIXED), kv)
    assert backend.download(kv[0]).shape == (4,)
    assert set(outputs) == {"tokens", "finite"}


def test_a_batch_may_be_filled_again_at_once(backend, step, weights):
    bucket = replace(MIXED, sample="plain")
    batch, compiled = batch_of(bucket), backend.compile(step, bucket, weights, [])
    wanted = backend.download(compiled.run(batch, [])[0]["tokens"])
    outputs, _ = compiled.run(batch, [])
    batch.ints[:], batch.floats[:] = 0, 0
    np.testing.assert_array_equal(backend.download(outputs["tokens"]), wanted)


def test_hidden_states_count_beside_the_scratch_of_the_head(backend, step, weights):
    compiled = backend.compile(step, MIXED, weights, [])
    compiled.bytes  # noqa: B018
    layers, head = (program.memory for program in compiled._programs)
    hidden = 4 * WIDTH * (MIXED.num_tokens + MIXED.num_seqs)
    assert layers.outputs >= hidden
    assert compiled._scratch() == max(layers.scratch, layers.outputs + head.scratch)


def test_requests_that_sample_by_default_compile_nothing_while_serving(tiny_llm):
    llm = tiny_llm(
        device="tpu:interpreter",
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=32,
    )
    late = llm.engine.metrics.late_compiles
    asked = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=2, top_p=0.8, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    ]
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 1]]
    together = [c.token_ids for c in llm.generate(prompts, asked)]
    assert late.value == 0
    alone = [llm.generate([p], a)[0].token_ids for p, a in zip(prompts, asked, strict=True)]
    assert together == alone
    assert late.value == 0
    llm.generate([prompts[0]], SamplingParams(max_tokens=2, repetition_penalty=1.3))
    assert late.value > 0
