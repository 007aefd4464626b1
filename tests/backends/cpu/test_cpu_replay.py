"""Recorded decode steps: what they repeat, what they refresh, and when they are forgotten."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from leadframe.platform import AttnParams, Bucket, KVLayerSpec, KVSpec, StepBatch
from leadframe.platform.batch import packed_sizes, unpack
from leadframe_cpu.arena import Arena, Region
from leadframe_cpu.backend import CpuBackend
from leadframe_cpu.merging import merge
from leadframe_cpu.replay import MAX_ROWS, ReplayedStep, is_worth_recording, padded

PARAMS = AttnParams.of(0.125)
SPEC = KVSpec((KVLayerSpec(1, 64),), 16)


@pytest.fixture
def backend():
    return CpuBackend(threads=2, native="on")


@pytest.fixture
def model(backend, rng):
    """(step, weights, kv): one layer of a model, and a count of how often Python ran it."""
    weights = {
        "table": backend.upload(rng.standard_normal((30, 64)).astype(np.float32), role="embed"),
        "linear": backend.upload(rng.standard_normal((64, 64)).astype(np.float32), role="linear"),
        "scale": backend.upload(np.array([0.5], np.float32)),
    }
    calls = []

    def step(weights, kv, arrays):
        calls.append(arrays.bucket)
        ops = backend.ops
        x = ops["embed"](weights["table"], arrays.token_ids) * weights["scale"]  # torch multiplies
        heads = ops["linear"](x, weights["linear"]).reshape(x.shape[0], 1, 64)
        plan = ops["plan"](arrays, PARAMS)
        layer = ops["kv_append"](kv[0], heads, heads + 1.0, plan)
        out = ops["attention"](heads, layer, plan, PARAMS).reshape(-1, 64)
        return {"out": out, "tokens": ops["argmax"](out)}, [layer]

    return step, weights, backend.kv_alloc(SPEC, 40), calls


def _batch(positions, tokens, tables, width):
    num = len(positions)
    bucket = Bucket(num, num, num, width, num)
    num_ints, num_floats = packed_sizes(bucket)
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    arrays = unpack(bucket, ints, floats)
    arrays.query_start[:] = np.arange(num + 1)
    arrays.positions[:] = positions
    arrays.seq_lens[:] = np.asarray(positions) + 1
    arrays.token_ids[:] = tokens
    for row, (position, table) in enumerate(zip(positions, tables, strict=True)):
        arrays.block_table[row] = table[:width]
        arrays.slots[row] = table[position // 16] * 16 + position % 16
    arrays.logits_idx[:] = np.arange(num)
    return StepBatch(bucket, ints, floats, num, num, max(positions) + 1)


def _walk(backend, model, steps=40):
    """Decodes two sequences that grow over block edges; returns every output."""
    step, weights, kv, _ = model
    tables = ([1, 2, 3, 4], [9, 8, 7, 6])
    outputs = []
    for index in range(steps):
        width = index // 16 + 1
        batch = _batch([index, index], [index % 30, 29 - index % 30], tables, width)
        compiled = backend.compile(step, batch.bucket, weights, kv)
        result, kv = compiled.run(batch, kv)
        outputs.append({name: backend.download(value) for name, value in result.items()})
    return outputs


def test_replayed_steps_are_the_steps(backend, model, monkeypatch):
    step, weights, _, calls = model
    outputs = _walk(backend, model)
    assert len(calls) == 2  # once as Python, once to record; forty steps, three widths
    monkeypatch.setattr("leadframe_cpu.backend.is_worth_recording", lambda bucket: False)
    again = _walk(backend, (step, weights, backend.kv_alloc(SPEC, 40), calls))
    assert len(calls) == 42
    for ours, theirs in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(ours["out"], theirs["out"])
        np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])


def test_what_torch_computes_is_repeated_too(backend, model):
    _walk(backend, model, 3)
    (entry,) = backend._recorder._entries.values()
    assert entry.recording.num_torch == 2  # `* scale` and `+ 1.0`
    assert entry.recording.num_native >= 5


def test_another_cache_is_another_recording(backend, model):
    step, weights, _, calls = model
    first = _walk(backend, model, 5)
    other = backend.kv_alloc(SPEC, 40)
    second = _walk(backend, (step, weights, other, calls), 5)
    assert len(calls) == 4
    np.testing.assert_array_equal(first[-1]["out"], second[-1]["out"])


def test_freeing_a_cache_forgets_the_recordings(backend, model):
    _walk(backend, model, 3)
    assert backend._recorder._entries
    backend.kv_free(model[2])
    assert not backend._recorder._entries


def test_a_step_that_reads_a_value_keeps_running_as_python(backend, model):
    step, weights, kv, calls = model

    def reading(weights, kv, arrays):
        outputs, kv = step(weights, kv, arrays)
        return {"total": torch.tensor(float(outputs["out"].sum()))}, kv

    totals = [x["total"] for x in _walk(backend, (reading, weights, kv, calls), 5)]
    assert len(calls) == 6  # the refused recording ran its step twice
    assert len({float(total) for total in totals}) == 5


def test_an_error_leaves_the_ops_as_they_were(backend, model):
    _, weights, kv, _ = model
    runs = []

    def failing(weights, kv, arrays):
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("on purpose")
        return {"x": backend.ops["embed"](weights["table"], arrays.token_ids)}, kv

    batch = _batch([0], [1], [[1]], 1)
    compiled = backend.compile(failing, batch.bucket, weights, kv)
    compiled.run(batch, kv)
    with pytest.raises(ValueError, match="on purpose"):
        compiled.run(batch, kv)
    assert backend._native.tape is None
    for _ in range(3):
        outputs, _ = compiled.run(batch, kv)
        torch.testing.assert_close(
            outputs["x"], torch.from_numpy(backend.download(weights["table"])[1:2])
        )


def test_only_small_decode_steps_are_recorded(backend, model):
    decode = Bucket(4, 4, 4, 8, 4)
    assert is_worth_recording(decode)
    assert not is_worth_recording(Bucket(5, 4, 3, 8, 4))
    assert not is_worth_recording(Bucket(*[MAX_ROWS + 1] * 3, 8, 4))
    small = backend.kv_alloc(KVSpec((KVLayerSpec(1, 64),), 4), 8)
    step, weights, kv, _ = model
    assert isinstance(backend.compile(step, decode, weights, kv), ReplayedStep)
    assert not isinstance(backend.compile(step, decode, weights, small), ReplayedStep)


def test_widths_share_a_recording():
    assert padded(Bucket(1, 1, 1, 1, 1)) == padded(Bucket(1, 1, 1, 32, 1))
    assert padded(Bucket(1, 1, 1, 33, 1)).num_blocks == 64


def test_regions_reuse_what_died_and_never_what_lives():
    region = Region(Arena())
    first = region.new((10, 10), torch.float32)
    view = first[2:]
    address = first.data_ptr()
    del first
    second = region.new((10, 10), torch.float32)
    assert second.data_ptr() != address  # a view still lives there
    del view
    third = region.new((5,), torch.float32)
    assert third.data_ptr() == address
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (second, third))


def test_regions_grow_and_share_slabs():
    arena = Arena()
    big = Region(arena).new((5_000_000,), torch.float32)
    size = arena.num_bytes
    assert size >= 20_000_000
    other = Region(arena).new((5_000_000,), torch.float32)  # another recording: the same place
    assert other.data_ptr() == big.data_ptr()
    assert arena.num_bytes == size


def test_neighbours_are_joined():
    region = Region(Arena())
    parts = [region.new((1000,), torch.float32) for _ in range(3)]
    start = parts[0].data_ptr()
    del parts
    assert region.new((3000,), torch.float32).data_ptr() == start


def _products(backend, rng, count, rows, same=True):
    weights = [
        backend.upload(rng.standard_normal((size, 64)).astype(np.float32), role="linear")
        for size in (96, 40, 33)[:count]
    ]
    inputs = [torch.randn(rows, 64)] * count if same else [torch.randn(rows, 64) for _ in weights]
    return weights, inputs


class Notes:
    """A tape that only notes calls."""

    def __init__(self):
        self.calls, self.outputs = [], []

    def new(self, shape, dtype):
        self.outputs.append(torch.zeros(shape, dtype=dtype))
        return self.outputs[-1]

    def add(self, kernel, packed):
        self.calls.append((kernel, packed))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_of_one_input_are_one_call(backend, rng, rows):
    ops, notes = backend._native, Notes()
    weights, inputs = _products(backend, rng, 3, rows)
    ops.tape = notes
    want = [ops.linear(x, weight).clone() for x, weight in zip(inputs, weights, strict=True)]
    ops.tape = None
    (call,) = merge(notes.calls, *ops.products)
    for output in notes.outputs:
        output.zero_()
    ops.products[1](call.packed)
    for output, exact in zip(notes.outputs, want, strict=True):
        assert torch.equal(output, exact)


def test_products_that_differ_or_overlap_stay_apart(backend, rng):
    ops = backend._native
    linear, group = ops.products

    def addresses(calls):
        return [call.address for call in merge(calls, linear, group)]

    def call(x, y, n=16, m=2, k=64):
        return linear, linear.pack(x, y, 1, 0, 0, m, n, k, 0)

    apart, other = linear.address, (ops._gate, b"")
    assert addresses([call(8, 1000), call(8, 2000)]) == [group.address]
    assert addresses([call(8, 1000), call(16, 2000)]) == [apart, apart]
    assert addresses([call(8, 1000), call(8, 2000, m=3)]) == [apart, apart]
    assert addresses([call(8, 1000), call(8, 1000 + 127)]) == [apart, apart]
    assert addresses([call(8, 1000), call(8, 1000 + 128)]) == [group.address]
    assert addresses([call(8, 1000), other, call(8, 2000)]) == [apart, ops._gate.address, apart]
    assert addresses([]) == []


def test_what_may_be_a_view_is_repeated_when_it_was_a_copy(backend, model, monkeypatch):
    step, weights, kv, calls = model

    def turning(weights, kv, arrays):
        outputs, kv = step(weights, kv, arrays)
        wide = arrays.token_ids.long()  # in inference mode an op that may return its argument
        return {"out": outputs["out"].transpose(0, 1).reshape(-1), "wide": wide.contiguous()}, kv

    outputs = _walk(backend, (turning, weights, kv, calls), 6)
    assert len(calls) == 2
    monkeypatch.setattr("leadframe_cpu.backend.is_worth_recording", lambda bucket: False)
    again = _walk(backend, (turning, weights, backend.kv_alloc(SPEC, 40), calls), 6)
    for ours, theirs in zip(outputs, again, strict=True):
        np.testing.assert_array_equal(ours["out"], theirs["out"])
        np.testing.assert_array_equal(ours["wide"], theirs["wide"])


def test_a_step_whose_shapes_depend_on_values_keeps_running_as_python(backend, model):
    step, weights, kv, calls = model

    def choosing(weights, kv, arrays):
        _, kv = step(weights, kv, arrays)
        return {"odd": torch.nonzero(arrays.token_ids % 3)}, kv

    found = [len(x["odd"]) for x in _walk(backend, (choosing, weights, kv, calls), 6)]
    assert found == [(i % 3 > 0) + ((29 - i) % 3 > 0) for i in range(6)]
    assert len(calls) == 7


def test_recording_does_not_import_torch_compile(tmp_path):
    """It takes two seconds, in the middle of the first stream that decodes."""
    code = (
        "import pathlib, sys\n"
        "from leadframe import LLM, SamplingParams\n"
        "from leadframe.conformance.tiny_checkpoint import write_checkpoint\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "write_checkpoint(path, head_dim=16, seed=0)\n"
        "with LLM(str(path), device='cpu', max_model_len=64) as llm:\n"
        "    at_start = 'torch._dynamo' in sys.modules  # torch 2.8 has it from the beginning\n"
        "    llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))\n"
        "assert ('torch._dynamo' in sys.modules) == at_start\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
