"""Memory, transfers, partitions and errors of `TorchBackend`."""

import gc

import ml_dtypes
import numpy as np
import pytest
import torch

from leadframe.errors import ContractViolation, DeviceOOM, Unsupported
from leadframe.platform import KVLayerSpec, KVSpec, MemoryInfo, Partition
from leadframe_torch import AcceleratorLayer, Holdings, Rank
from leadframe_torch.devices import device_errors
from leadframe_torch.weights import part_index

SPEC = KVSpec((KVLayerSpec(2, 8), KVLayerSpec(1, 16)), 4)


class LazyWeight:
    """A weight source that notes what is read."""

    dtype = "float32"

    def __init__(self, values):
        self.values, self.shape, self.reads = values, values.shape, []

    def read(self, index=None):
        self.reads.append(index)
        return self.values if index is None else self.values[index]


@pytest.mark.parametrize(
    ("source", "dtype", "want"),
    [
        (np.float32, None, torch.float32),
        (np.float32, "bfloat16", torch.bfloat16),
        (ml_dtypes.bfloat16, None, torch.bfloat16),
        (ml_dtypes.bfloat16, "float32", torch.float32),
        (np.float16, "float32", torch.float32),
        (np.int32, None, torch.int32),
    ],
)
def test_upload_converts(backend, source, dtype, want):
    host = np.arange(6).reshape(2, 3).astype(source)
    array = backend.upload(host, dtype)
    assert array.dtype == want
    np.testing.assert_array_equal(backend.download(array).astype(np.float32), np.float32(host))


def test_upload_copies_and_takes_read_only_arrays(backend):
    host = np.ones(4, np.float32)
    host.setflags(write=False)
    array = backend.upload(host)
    array += 1
    assert host.tolist() == [1, 1, 1, 1]
    out = backend.download(array)
    out[0] = 9
    assert backend.download(array).tolist() == [2, 2, 2, 2]


def test_upload_refuses_what_torch_cannot_hold(backend):
    with pytest.raises(Unsupported, match="complex64"):
        backend.upload(np.zeros(2, np.complex64))


@pytest.mark.parametrize(
    ("partition", "rank", "want"),
    [
        (Partition(0), Rank(1, 2), np.s_[4:8, :]),
        (Partition(1), Rank(0, 2), np.s_[:, 0:3]),
        (Partition(0, heads=4, unit=2), Rank(1, 2), np.s_[4:8, :]),
        (Partition(0, heads=2, unit=4), Rank(2, 4), np.s_[4:8, :]),  # a head on two ranks
        (Partition(), Rank(1, 2), np.s_[:, :]),
        (None, Rank(1, 2), np.s_[:, :]),
    ],
)
def test_a_rank_reads_only_its_part(make_backend, partition, rank, want):
    source = LazyWeight(np.arange(48, dtype=np.float32).reshape(8, 6))
    array = make_backend(rank=rank).upload(source, partition=partition)
    np.testing.assert_array_equal(array.numpy(), source.values[want])
    whole = partition is None or partition.axis is None
    assert source.reads == [None if whole else part_index(source.shape, partition, rank)]


def test_a_part_that_does_not_divide_is_named():
    with pytest.raises(Unsupported, match=r"axis 0 .* 9 parts.* 2 ranks"):
        part_index((9, 4), Partition(0), Rank(0, 2))


def test_kv_round_trip_and_cost(backend, rng):
    before = backend.memory().used
    kv = backend.kv_alloc(SPEC, 5)
    assert backend.memory().used - before == 5 * backend.kv_block_bytes(SPEC)
    assert backend.kv_block_bytes(SPEC) == 4 * 4 * 2 * (2 * 8 + 16)
    assert not backend.kv_read(kv[0], range(5)).any()
    data = rng.standard_normal((2, 2, 4, 2, 8)).astype(np.float32)
    kv[0] = backend.kv_write(kv[0], [3, 1], data)
    np.testing.assert_array_equal(backend.kv_read(kv[0], [1, 3]), data[::-1])
    assert not backend.kv_read(kv[0], [0, 2, 4]).any()
    backend.kv_free(kv)
    assert backend.memory().used == before
    assert kv == []


def test_kv_write_checks_its_shape(backend):
    (layer, _) = backend.kv_alloc(SPEC, 3)
    with pytest.raises(ContractViolation, match=r"\(1, 2, 4, 2, 8\)"):
        backend.kv_write(layer, [1], np.zeros((1, 2, 4, 1, 8), np.float32))


def test_memory_is_counted_while_arrays_live(backend):
    before = backend.memory()
    array = backend.upload(np.zeros(1000, np.float32))
    view = array[:10]
    assert backend.memory().used == before.used + 4000
    del array, view
    gc.collect()
    after = backend.memory()
    assert after.used == before.used
    assert after.peak >= before.used + 4000


def test_a_cache_that_does_not_fit_is_refused_and_nothing_is_lost(make_backend):
    backend = make_backend(total=10_000)
    with pytest.raises(DeviceOOM) as caught:
        backend.kv_alloc(SPEC, 1000)
    assert (caught.value.phase, caught.value.requested) == ("kv", 1_024_000)
    assert caught.value.free == 10_000
    backend.kv_free(backend.kv_alloc(SPEC, 5))


def test_torch_running_out_becomes_device_oom(make_backend):
    layer, held = make_backend().layer, Holdings()
    with pytest.raises(DeviceOOM), device_errors(layer, held, "step", 7):
        raise torch.OutOfMemoryError("no")
    with pytest.raises(DeviceOOM), device_errors(layer, held, "load", 7):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="mat1"), device_errors(layer, held, "step", 7):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_close_can_be_called_twice(backend):
    backend.close()
    backend.close()
    assert backend.layer.released == 2


class FakeModule:
    """A device module with what torch's accelerators have in common."""

    def __init__(self):
        self.calls = []

    def mem_get_info(self, device):
        return 600, 1000

    def memory_allocated(self, device):
        return 100

    def max_memory_allocated(self, device):
        return 250

    def memory_reserved(self, device):
        return 300

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def empty_cache(self):
        self.calls.append("empty_cache")


def test_the_layer_of_ordinary_accelerators(monkeypatch):
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    layer = AcceleratorLayer(torch.device("meta"))
    # reserved but unused memory is free for this process
    assert layer.memory(Holdings()) == MemoryInfo(1000, 800, 100, 250)
    layer.synchronize()
    layer.release_cached()
    assert module.calls == [("synchronize", torch.device("meta")), "empty_cache"]


def test_a_module_without_statistics_reports_what_was_handed_out(monkeypatch):
    class Bare:
        def mem_get_info(self, device):
            return 600, 1000

    monkeypatch.setattr(torch, "get_device_module", lambda device: Bare())
    held = Holdings()
    tensor = torch.zeros(4)
    held.add(tensor)
    layer = AcceleratorLayer(torch.device("meta"))
    assert layer.memory(held) == MemoryInfo(1000, 600, 16, 16)
    layer.release_cached()


def test_the_namespace_has_the_two_primitives(backend):
    xp = backend.xp
    buffer = xp.zeros((3, 4))
    rows, cols = (xp.asarray(ids, dtype=xp.int32) for ids in ([0, 2], [1, 3]))
    xp.put(buffer, rows, cols, xp.asarray([5.0, 6.0]))
    assert buffer[0, 1] == 5
    assert buffer[2, 3] == 6
    values, ids = xp.top_k(xp.asarray([[1.0, 3.0, 2.0]]), 2)
    assert (values.tolist(), ids.tolist(), ids.dtype) == ([[3.0, 2.0]], [[1, 2]], torch.int32)


def test_the_namespace_creates_on_its_device():
    from leadframe_torch.namespace import torch_namespace

    xp = torch_namespace(torch.device("meta"))
    assert xp.zeros((2,)).device.type == "meta"
    assert xp.arange(3).device.type == "meta"
    assert xp.float32 is torch.float32
