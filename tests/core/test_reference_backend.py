"""The NumPy backend's own bookkeeping; the conformance kit covers the rest."""

import ml_dtypes
import numpy as np
import pytest

from leadframe.platform import MEMBERS, Backend, DeviceOOM, KVLayerSpec, KVSpec, Unsupported
from leadframe.platform import host_memory as host_memory_of
from leadframe.platform.reference.backend import ReferenceBackend

SPEC = KVSpec((KVLayerSpec(2, 8), KVLayerSpec(1, 4)), block_size=4)


@pytest.fixture
def backend():
    return ReferenceBackend(memory_bytes=1 << 20)


def test_has_the_members_and_nothing_else(backend):
    assert isinstance(backend, Backend)
    assert {name for name in dir(backend) if not name.startswith("_")} == set(MEMBERS)


def test_memory_is_what_arrays_hold(backend):
    kv = backend.kv_alloc(SPEC, 10)
    assert backend.memory().used == 10 * backend.kv_block_bytes(SPEC) == 10 * 2 * 20 * 4 * 4
    weight = backend.upload(np.zeros(100, np.float32))
    assert backend.memory().used == 6400 + 400
    del weight
    backend.kv_free(kv)
    memory = backend.memory()
    assert (memory.used, memory.peak, memory.free) == (0, 6800, 1 << 20)


def test_too_much_is_refused_and_nothing_changes(backend):
    with pytest.raises(DeviceOOM) as caught:
        backend.kv_alloc(SPEC, 10_000)
    assert caught.value.phase == "kv"
    assert backend.memory().used == 0
    with pytest.raises(DeviceOOM):
        backend.upload(np.zeros(1 << 20, np.float32))
    backend.kv_alloc(SPEC, 2)


def test_upload_copies_and_converts(backend):
    host = np.ones(3, ml_dtypes.bfloat16)
    array = backend.upload(host, "float32")
    host[:] = 2
    np.testing.assert_array_equal(backend.download(array), np.float32([1, 1, 1]))


def test_canonical_layout_round_trips(backend):
    rng = np.random.default_rng(0)
    layer = backend.kv_alloc(SPEC, 6)[0]
    data = rng.standard_normal((2, 2, 4, 2, 8)).astype(np.float32)
    layer = backend.kv_write(layer, [5, 1], data)
    np.testing.assert_array_equal(backend.kv_read(layer, [1, 5]), data[::-1])
    np.testing.assert_array_equal(backend.kv_read(layer, [0, 2, 3, 4]), 0)


def test_an_unknown_kv_dtype_is_unsupported(backend):
    with pytest.raises(Unsupported, match="bfloat16"):
        backend.kv_alloc(KVSpec(SPEC.layers, 4, "bfloat16"), 2)


def test_host_memory_respects_the_cgroup(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert host_memory_of(tmp_path) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n")
    total, free = host_memory_of(tmp_path)
    assert total > 1_000_000
    assert free > 1_000_000
