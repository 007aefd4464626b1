"""Steps: eager, recorded with a pretended graph, and traced by torch.compile."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from leadframe.errors import CompileError, DeviceLost, DeviceOOM
from leadframe.platform import Bucket, KVLayerSpec, KVSpec, StepBatch, packed_sizes, unpack

BUCKET = Bucket(num_tokens=3, num_seqs=3, num_decodes=3, num_blocks=2, num_logits=3)


def _batch(bucket=BUCKET, **values):
    num_ints, num_floats = packed_sizes(bucket)
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    arrays = unpack(bucket, ints, floats)
    for name, value in values.items():
        getattr(arrays, name)[:] = value
    return StepBatch(bucket, ints, floats, 3, 3, 1)


def _step(weights, kv, arrays):
    kv[0].add_(0)
    return {"sum": arrays.token_ids * 2 + weights["w"]}, kv


class Split:
    """A step in two parts: the head adds what only some buckets carry."""

    def __init__(self):
        self.heads = 0

    def __call__(self, weights, kv, arrays):
        hidden, kv = self.forward(weights, kv, arrays)
        return self.head(weights, hidden, arrays), kv

    def forward(self, weights, kv, arrays):
        assert arrays.temperature is None, "the layers saw what only the head may"
        return {"sum": arrays.token_ids * 2 + weights["w"]}, kv

    def head(self, weights, hidden, arrays):
        self.heads += 1
        logits = hidden["sum"][arrays.logits_idx.long()]
        if arrays.temperature is None:
            return {"sum": logits}
        return {"sum": logits + arrays.temperature + arrays.edit_ids.sum(1)}


PLAIN = replace(BUCKET, sample="plain", num_edits=16, num_mask_words=3)


class PretendGraphs:
    """Records by keeping the function: a replay runs it into the recorded result."""

    def __init__(self):
        self.records = self.live = 0

    def record(self, function):
        self.records += 1
        self.live += 1
        graphs, result = self, function()

        class Graph:
            bytes = 77

            def replay(self):
                outputs, _ = function()
                for name, value in outputs.items():
                    result[0][name].copy_(value)

            def close(self):
                self.bytes = 0
                graphs.live -= 1

        return Graph(), result


@pytest.fixture
def parts(make_backend):
    def make(**settings):
        backend = make_backend(**settings)
        kv = backend.kv_alloc(KVSpec((KVLayerSpec(1, 4),), 4), 4)
        return backend, kv, {"w": backend.upload(np.array([1, 2, 3], np.int32))}

    return make


def test_an_eager_step_owns_its_inputs(parts):
    backend, kv, weights = parts()
    step = backend.compile(_step, BUCKET, weights, kv)
    batch = _batch(token_ids=[10, 20, 30])
    outputs, _ = step.run(batch, kv)
    batch.ints[:] = 0
    assert outputs["sum"].tolist() == [21, 42, 63]
    assert (step.bytes, step.compile_seconds, step.capture_seconds) == (0, 0, 0)
    assert step.cache_hit is None
    step.close()


def test_an_eager_step_holds_no_memory_between_runs(parts):
    """Engines keep hundreds of them, for sizes that may never come again."""
    backend, kv, weights = parts()
    inputs = []

    def step(weights, kv, arrays):
        inputs.append(weakref.ref(arrays.block_table))
        return {"tokens": arrays.token_ids + 1}, kv

    compiled = backend.compile(step, BUCKET, weights, kv)
    outputs, _ = compiled.run(_batch(token_ids=[1, 2, 3]), kv)
    assert outputs["tokens"].tolist() == [2, 3, 4]
    assert compiled.bytes == 0
    assert inputs[0]() is None


def test_a_recorded_step_is_called_once_and_replayed(parts):
    graphs = PretendGraphs()
    backend, kv, weights = parts(graphs=graphs)
    step = backend.compile(_step, BUCKET, weights, kv)
    for start in (0, 5):
        outputs, _ = step.run(_batch(token_ids=np.arange(3) + start), kv)
        assert outputs["sum"].tolist() == [2 * start + 1, 2 * start + 4, 2 * start + 7]
    assert graphs.records == 1
    assert step.bytes == 77 + 4 * sum(packed_sizes(BUCKET))
    assert step.capture_seconds > 0
    step.close()
    assert step.bytes == 0


def test_buckets_that_only_sample_otherwise_share_a_recording(parts):
    graphs, split = PretendGraphs(), Split()
    backend, kv, weights = parts(graphs=graphs)
    first = backend.compile(split, BUCKET, weights, kv)
    second = backend.compile(split, PLAIN, weights, kv)
    assert (graphs.records, split.heads) == (1, 0)
    assert first.bytes > 77
    assert (second.bytes, second.capture_seconds) == (0, 0)
    asked = {"token_ids": [10, 20, 30], "logits_idx": [2, 1, 0]}
    for _ in range(2):
        plain = _batch(PLAIN, temperature=0.5, edit_ids=1, **asked)
        assert second.run(plain, kv)[0]["sum"].tolist() == [79.5, 58.5, 37.5]
        assert first.run(_batch(**asked), kv)[0]["sum"].tolist() == [63, 42, 21]
    assert split.heads == 4
    heads = split.heads
    first.replay()
    assert split.heads == heads + 1, "a benchmark repeats what ran last, head included"
    first.close()
    assert graphs.live == 1
    assert second.run(_batch(PLAIN, **asked), kv)[0]["sum"].tolist() == [63, 42, 21]
    second.close()
    assert graphs.live == 0


def test_a_step_that_is_closed_twice_frees_nothing_that_another_replays(parts):
    graphs, split = PretendGraphs(), Split()
    backend, kv, weights = parts(graphs=graphs)
    first, second = (backend.compile(split, b, weights, kv) for b in (BUCKET, PLAIN))
    first.close()
    first.close()
    assert graphs.live == 1
    second.close()
    assert graphs.live == 0


def test_another_shape_cache_or_model_is_recorded_anew(parts):
    graphs, split = PretendGraphs(), Split()
    backend, kv, weights = parts(graphs=graphs)
    other = backend.kv_alloc(KVSpec((KVLayerSpec(1, 4),), 4), 4)
    wide = replace(BUCKET, num_blocks=5)
    kept = [
        backend.compile(*asked)
        for asked in [
            (split, BUCKET, weights, kv),
            (split, BUCKET, dict(weights), kv),
            (split, wide, weights, kv),
            (split, BUCKET, weights, other),
            (Split(), BUCKET, weights, other),
        ]
    ]
    assert graphs.records == len(kept)
    for step in kept:
        step.close()
    assert graphs.live == 0
    for _ in range(2):
        kept.append(backend.compile(split, wide, weights, kv))
        kept[-1].close()
    assert graphs.records == len(kept), "a graph that was freed is not replayed"


def test_a_recorded_step_refuses_another_cache(parts):
    backend, kv, weights = parts(graphs=PretendGraphs())
    step = backend.compile(_step, BUCKET, weights, kv)
    other = backend.kv_alloc(KVSpec((KVLayerSpec(1, 4),), 4), 4)
    with pytest.raises(CompileError, match="another KV cache"):
        step.run(_batch(), other)


def test_steps_without_capture_are_not_recorded(parts):
    graphs = PretendGraphs()
    backend, kv, weights = parts(graphs=graphs)
    backend.compile(_step, BUCKET, weights, kv, capture=False).run(_batch(), kv)
    assert graphs.records == 0


@pytest.mark.parametrize("graphs", [None, PretendGraphs()])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceOOM),
        (torch.AcceleratorError("an illegal memory access"), DeviceLost),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceOOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."), DeviceOOM),
    ],
)
def test_what_fails_in_a_step_is_an_error_of_the_contract(parts, graphs, raised, expected):
    backend, kv, weights = parts(graphs=graphs)
    calls = iter([None] if graphs else [])

    def step(weights, kv, arrays):
        if next(calls, raised) is not None:
            raise raised
        return {"x": arrays.token_ids + 1}, kv

    compiled = backend.compile(step, BUCKET, weights, kv)
    with pytest.raises(expected, match="step"):
        compiled.run(_batch(), kv)


def test_backends_with_graphs_plan_without_reading(make_backend):
    assert make_backend().may_read_lengths()
    assert not make_backend(graphs=PretendGraphs()).may_read_lengths()
    assert not make_backend(compile_mode="step").may_read_lengths()


def test_steps_run_without_autograd(parts):
    backend, kv, weights = parts()

    def step(weights, kv, arrays):
        return {"x": torch.ones(1), "mode": torch.tensor(torch.is_inference_mode_enabled())}, kv

    outputs, _ = backend.compile(step, BUCKET, weights, kv).run(_batch(), kv)
    assert outputs["mode"]


@pytest.mark.slow
def test_a_traced_step_matches_and_says_what_it_cost(parts):
    backend, kv, weights = parts(compile_mode="step")
    step = backend.compile(_step, BUCKET, weights, kv)
    outputs, _ = step.run(_batch(token_ids=[4, 5, 6]), kv)
    assert outputs["sum"].tolist() == [9, 12, 15]
    assert step.compile_seconds > 0
    assert step.cache_hit in (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [False, True])
def test_traced_layers_are_shared_and_heads_are_not_traced(parts, is_recorded):
    graphs, split = PretendGraphs() if is_recorded else None, Split()
    split.forward = lambda weights, kv, arrays: ({"sum": arrays.token_ids * 2 + weights["w"]}, kv)
    backend, kv, weights = parts(compile_mode="step", graphs=graphs)
    compiled = torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    steps = [backend.trace(split, bucket, weights, kv) for bucket in (BUCKET, PLAIN)]
    if is_recorded:
        buckets = (BUCKET, PLAIN)
        functions = [(step.function, bucket) for step, bucket in zip(steps, buckets, strict=True)]
        steps = [backend.record(*asked, weights, kv) for asked in functions]
        assert graphs.records == 1
    asked = {"token_ids": [10, 20, 30], "logits_idx": [2, 1, 0]}
    assert steps[0].run(_batch(**asked), kv)[0]["sum"].tolist() == [63, 42, 21]
    assert steps[1].run(_batch(PLAIN, edit_ids=1, **asked), kv)[0]["sum"].tolist() == [79, 58, 37]
    assert compiled["unique_graphs"] == before + 1


@pytest.mark.slow
def test_a_step_that_is_not_one_graph_is_an_error(parts):
    backend, kv, weights = parts(compile_mode="step")

    def step(weights, kv, arrays):
        if arrays.token_ids[0].item() > 3:
            return {"x": arrays.token_ids + 1}, kv
        return {"x": arrays.token_ids}, kv

    with pytest.raises(CompileError, match="num_tokens=3"):
        backend.compile(step, BUCKET, weights, kv)
