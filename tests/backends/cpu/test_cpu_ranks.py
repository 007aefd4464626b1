"""What a rank on the host holds: its part of every packed weight, of the memory and the cores."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from leadframe.gguf_file import TensorInfo
from leadframe.models.gguf_weights import QuantizedWeight
from leadframe.models.sources import MappedFile
from leadframe.platform import Device, Limits, Partition
from leadframe.platform.batch import Bucket
from leadframe_cpu import plugin
from leadframe_cpu.backend import CpuBackend
from leadframe_cpu.packed import Format
from leadframe_cpu.replay import ReplayedStep
from leadframe_torch import Rank
from leadframe_torch.weights import part_index

ROWS, COLUMNS = 24, 192
FORMATS = {Kind.Q4_0: Format.INT4_F32, Kind.Q4_1: Format.INT4_F16, Kind.Q8_0: Format.INT8_F16}


@pytest.fixture
def stored(tmp_path, rng):
    """Makes a quantised weight in a file, and what it stands for."""

    def make(kind):
        raw = gguf.quants.quantize(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), kind)
        path = tmp_path / kind.name
        path.write_bytes(raw.tobytes())
        info = TensorInfo("w", (ROWS, COLUMNS), kind.name, 0, raw.nbytes)
        return QuantizedWeight(MappedFile(path), info), gguf.quants.dequantize(raw, kind)

    return make


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "partition", [Partition(0), Partition(1), Partition(0, 6, 4), Partition(1, 6, 32)], ids=repr
)
def test_a_rank_packs_its_part_of_the_blocks(stored, kind, count, partition):
    source, whole = stored(kind)
    for index in range(count):
        rank = Rank(index, count)
        backend = CpuBackend(1, native="on", rank=rank)
        weight = backend.upload(source, "float32", partition, "linear")
        assert weight.layout == FORMATS[kind]
        part = whole[part_index(whole.shape, partition, rank)]
        np.testing.assert_array_equal(backend.download(weight), part)


def test_a_part_that_cuts_blocks_is_dequantised(stored):
    source, whole = stored(Kind.Q4_1)
    backend = CpuBackend(1, native="on", rank=Rank(1, 4))
    weight = backend.upload(source, "float32", Partition(1), "linear")  # 48 columns: 1.5 blocks
    assert weight.layout == Format.F32
    np.testing.assert_array_equal(backend.download(weight), whole[:, 48:96])


def test_a_tied_head_is_shared_only_with_the_same_part(stored):
    source, _ = stored(Kind.Q4_1)
    backend = CpuBackend(1, native="on", rank=Rank(0, 2))
    embed = backend.upload(source, "float32", Partition(0), "embed")
    assert backend.upload(source, "float32", Partition(0), "linear") is embed
    assert backend.upload(source, "float32", Partition(1), "linear") is not embed


def test_ranks_divide_the_memory_of_the_host(native):
    whole, shared = native.memory(), CpuBackend(1, native="off", rank=Rank(0, 4)).memory()
    assert shared.total == whole.total // 4
    assert shared.free < whole.free // 3


def test_ranks_divide_the_cores(monkeypatch):
    asked = []
    monkeypatch.setattr(plugin, "usable_cores", lambda: 6)
    monkeypatch.setattr(
        "leadframe_cpu.backend.CpuBackend", lambda **settings: asked.append(settings)
    )
    for ranks in (1, 2, 16):
        plugin.platform_create(Device(0, "host"), {}, Limits(tensor_parallel_size=ranks))
    plugin.platform_create(Device(0, "host"), {"threads": 5}, Limits(tensor_parallel_size=2))
    assert [settings["threads"] for settings in asked] == [6, 3, 1, 5]


def test_steps_of_several_ranks_are_not_replayed():
    bucket = Bucket(1, 1, 1, 1, 1)
    from leadframe.platform import KVLayerSpec, KVSpec

    for count, is_replayed in ((1, True), (2, False)):
        backend = CpuBackend(1, native="on", rank=Rank(0, count))
        kv = backend.kv_alloc(KVSpec((KVLayerSpec(2, 16),), 16), 2)
        step = backend.compile(lambda weights, kv, arrays: ({}, kv), bucket, {}, kv)
        assert isinstance(step, ReplayedStep) == is_replayed


def test_what_is_claimed_of_ranks():
    for count in (1, 2, 3):
        caps = CpuBackend(1, native="on", rank=Rank(0, count)).caps
        assert caps.rank_processes
        assert caps.tensor_parallel == 16
        assert caps.batch_invariant, "see the test below, and tests/e2e/test_tensor_parallel.py"
    alone = CpuBackend(1, compile_mode="step").caps
    assert (alone.tensor_parallel, alone.rank_processes) == (1, False), "traced steps exclude ranks"


def test_a_row_shared_by_three_ranks_has_the_same_bits_in_any_batch(rng, tmp_path):
    x = rng.standard_normal((9, ROWS), np.float32)
    weight = rng.standard_normal((33, ROWS), np.float32)

    def project(index):
        backend = CpuBackend(1, native="on", rank=Rank(index, 3, str(tmp_path)))
        part = backend.upload(weight, "float32", Partition(1), "linear")
        linear, all_reduce = backend.ops["linear"], backend.ops["all_reduce"]
        rows = backend.upload(np.ascontiguousarray(np.split(x, 3, 1)[index]))
        together = all_reduce(linear(rows, part))
        alone = [all_reduce(linear(rows[i : i + 1], part)) for i in range(len(x))]
        return backend.download(together), np.concatenate(list(map(backend.download, alone)))

    with ThreadPoolExecutor(3) as threads:
        for together, alone in threads.map(project, range(3)):
            np.testing.assert_array_equal(together, alone)
            np.testing.assert_allclose(together, x @ weight.T, atol=1e-4)
