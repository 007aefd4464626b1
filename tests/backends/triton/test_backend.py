"""The shared backend on the host: 8-bit caches, recorded and compiled steps, tracing."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from leadframe.errors import Unsupported
from leadframe.platform import Limits
from leadframe.platform.backend import KVLayerSpec, KVSpec
from leadframe.platform.batch import Bucket, StepArrays, StepBatch, packed_sizes, unpack
from leadframe.platform.capabilities import AttnParams
from leadframe_triton.arch import ARCHS

BUCKET = Bucket(4, 4, 4, 2, 0, "skip")


class FakeGraphs:
    """Records a call by keeping it; a replay writes into the first call's result."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def record(self, function):
        self.recorded += 1
        result = function()
        graphs = self

        class Graph:
            bytes = 123

            def replay(self):
                graphs.replayed += 1
                with torch.inference_mode():
                    again = function()
                    for name, value in again[0].items():
                        result[0][name].copy_(value)

            def close(self):
                self.bytes = 0

        return Graph(), result


@pytest.fixture
def make_backend():
    from leadframe_torch import HostLayer
    from leadframe_triton.backend import Settings, TritonBackend

    made = []

    def make(graphs=None, arch="sm_90", **settings):
        layer = HostLayer()  # the host's memory; the architecture is another matter
        layer.graphs = graphs
        made.append(TritonBackend(layer, ARCHS[arch], Settings(**settings), Limits()))
        made[-1]._uploader = None
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(token_ids):
    ints = np.zeros(packed_sizes(BUCKET)[0], np.int32)
    unpack(BUCKET, ints, None).token_ids[:] = token_ids
    return StepBatch(BUCKET, ints, np.zeros(0, np.float32), 4, 4, 4)


def double(weights, kv, arrays):
    return {"out": arrays.token_ids * weights["factor"]}, kv


@pytest.mark.parametrize(("compile_mode", "kind"), [("eager", "record"), ("step", "record")])
def test_steps_are_recorded_and_replayed_on_new_inputs(make_backend, compile_mode, kind):
    graphs = FakeGraphs()
    backend = make_backend(graphs, compile=compile_mode)
    assert backend.caps.graph == kind
    kv = [torch.zeros(1)]
    step = backend.compile(double, BUCKET, {"factor": torch.tensor(2)}, kv)
    assert graphs.recorded == 1
    assert step.bytes >= 123
    assert (step.compile_seconds > 0) == (compile_mode == "step")
    for ids in ([1, 2, 3, 4], [7, 0, 0, 1]):
        outputs, same = step.run(batch_of(ids), kv)
        assert outputs["out"].tolist() == [2 * i for i in ids]
        assert same is kv


def test_without_graphs_a_compiled_step_still_has_few_shapes(make_backend):
    assert make_backend(compile="step").caps.graph == "compile"
    assert make_backend(compile="eager").caps.graph == "none"
    # what is interpreted cannot be traced
    assert make_backend(compile="step", arch="interpreter").caps.graph == "none"


def test_an_eager_step_is_neither_compiled_nor_recorded(make_backend):
    graphs = FakeGraphs()
    step = make_backend(graphs, compile="step").compile(
        double, BUCKET, {"factor": torch.tensor(3)}, [], capture=False
    )
    assert step.run(batch_of([1, 1, 1, 1]), [])[0]["out"].tolist() == [3, 3, 3, 3]
    assert graphs.recorded == 0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_blocks_of_every_cache_type_can_be_read_and_written(make_backend, dtype):
    backend = make_backend()
    spec = KVSpec((KVLayerSpec(2, 64), KVLayerSpec(1, 32)), 16, dtype)
    size = 1 if dtype.startswith("float8") else 2
    assert backend.kv_block_bytes(spec) == 2 * 16 * (2 * 64 + 32) * size
    kv = backend.kv_alloc(spec, 5)
    assert [layer.dtype for layer in kv] == [getattr(torch, dtype)] * 2
    assert backend.memory().used == 5 * backend.kv_block_bytes(spec)
    data = np.random.default_rng(0).integers(-8, 8, (2, 2, 16, 2, 64)).astype(np.float32)
    assert backend.kv_write(kv[0], [3, 1], data) is kv[0]
    assert np.array_equal(backend.kv_read(kv[0], [3, 1]), data)
    assert not backend.kv_read(kv[0], [0, 2, 4]).any()
    backend.kv_free(kv)
    assert backend.memory().used == 0


@pytest.mark.parametrize("dtype", ["float64", "int4", "float8_e4m3fnuz"])
def test_other_cache_types_are_refused(make_backend, dtype):
    spec = KVSpec((KVLayerSpec(1, 64),), 16, dtype)
    with pytest.raises(Unsupported, match="KV dtypes of sm_90 are bfloat16"):
        make_backend().kv_alloc(spec, 2)


def test_batch_invariant_mode_brings_its_own_product(make_backend):
    from leadframe_torch import layer_ops

    assert make_backend().ops["linear"] is layer_ops.linear
    backend = make_backend(batch_invariant=True)
    assert backend.ops["linear"] is not layer_ops.linear
    assert backend.caps.batch_invariant
    assert backend.caps.tensor_parallel == 1, "ranks exclude it"
    assert make_backend().caps.tensor_parallel == 16
    assert backend.launches.split_tokens >= 512


def test_fixed_splits_depend_on_the_model_alone():
    from leadframe_triton.backend import fixed_split_tokens

    assert fixed_split_tokens(Limits(max_model_len=1024)) == 512
    assert fixed_split_tokens(Limits(max_model_len=131072)) == 8192
    assert fixed_split_tokens(Limits()) == fixed_split_tokens(Limits(max_num_seqs=1))


class Traced(Exception):
    """Ends a trace before anything runs."""


@pytest.mark.triton_aot
@pytest.mark.parametrize("sizes", [(3, 3, 3, 100), (20, 4, 2, 8)])
def test_ops_trace_into_one_graph(monkeypatch, make_backend, sizes):
    """What `compile=step` needs: no op leaves torch.compile's graph."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    backend = make_backend(batch_invariant=True)
    params, bucket = AttnParams.of(0.1, window=64), Bucket(*sizes, 0, "skip")
    names = [field.name for field in fields(StepArrays) if field.name != "bucket"]
    launches = []

    def step(q, kv, k, weight, tensors):
        arrays = StepArrays(bucket, *tensors)
        plan = backend.ops["plan"](arrays, params)
        out = backend.ops["attention"](q, backend.ops["kv_append"](kv, k, k, plan), plan, params)
        x, y = backend.ops["add_rms_norm"](out.flatten(1), out.flatten(1), weight[0], 1e-5)
        x = backend.ops["linear"](backend.ops["silu_mul"](x, y), weight)
        return backend.ops["argmax"](x.float())

    def compiler(graph, inputs):
        launches.extend(n for n in graph.graph.nodes if "triton_kernel" in str(n.target))

        def end(*arguments):
            raise Traced

        return end

    for kind in ("ragged", "decode"):  # as the eager run before tracing does
        from leadframe_triton.launch import TileKey

        backend.launches.choose_tile(backend.arch, TileKey(kind, 64, 4, 2, 16, True))
    half = {"dtype": torch.bfloat16}
    arrays = unpack(bucket, torch.zeros(packed_sizes(bucket)[0], dtype=torch.int32), None)
    q, k = torch.zeros(sizes[0], 8, 64, **half), torch.zeros(sizes[0], 2, 64, **half)
    kv, weight = torch.zeros(2, 9, 16, 2, 64, **half), torch.zeros(512, 512, **half)
    traced = torch.compile(step, backend=compiler, fullgraph=True, dynamic=False)
    with pytest.raises(Traced):
        traced(q, kv, k, weight, [getattr(arrays, name) for name in names])
    assert len(launches) >= 7


@pytest.mark.triton_interp
def test_the_engine_serves_from_recorded_steps(monkeypatch, tmp_path):
    """The engine as on a GPU: padded buckets, steps recorded at start-up and replayed."""
    from leadframe import LLM, SamplingParams
    from leadframe.conformance.tiny_checkpoint import write_checkpoint
    from leadframe_triton import backend

    class Layer(backend.HostLayer):
        def __init__(self, shared_by):
            super().__init__(shared_by)
            self.graphs = graphs

    def generate(device):
        sizes = {"max_num_seqs": 2, "max_model_len": 32, "num_blocks_override": 8}
        with LLM(str(tmp_path), device=device, dtype="float32", **sizes) as llm:
            at_start = graphs.recorded
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            done = llm.generate([[5, 6, 7], [8, 9, 10, 11, 12]], params)
            return [one.token_ids for one in done], at_start

    graphs = FakeGraphs()
    monkeypatch.setattr(backend, "HostLayer", Layer)
    write_checkpoint(tmp_path, head_dim=16, seed=0)
    tokens, at_start = generate("cuda:interpreter")
    assert at_start > 0
    assert graphs.replayed > 0
    assert graphs.recorded == at_start
    assert tokens == generate("reference")[0]
