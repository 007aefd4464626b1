"""Finding NVIDIA GPUs through a double of the driver's library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from leadframe_cuda.nvml import find

NOT_FOUND = 6


class Nvml:
    """The functions that detection calls, for a list of (name, capability, bytes, uuid)."""

    def __init__(self, devices, fails=None):
        self.devices, self.fails = devices, fails
        self.calls = []
        self.nvmlErrorString = lambda status: b"Driver/library version mismatch"

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name == self.fails:
                return NOT_FOUND
            getattr(self, f"_{name}", lambda *a: None)(*arguments)
            return 0

        return call

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.devices)

    def _nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1

    def _of(self, handle):
        return self.devices[handle.value - 1]

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self._of(handle)[1]

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self._of(handle)[2]

    def _nvmlDeviceGetName(self, handle, buffer, size):
        assert size <= ctypes.sizeof(buffer)
        buffer.value = self._of(handle)[0].encode()

    def _nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = self._of(handle)[3].encode()


H200 = ("NVIDIA H200", (9, 0), 150_754_820_096, "GPU-aaaa")
A100 = ("NVIDIA A100", (8, 0), 85_899_345_920, "GPU-bbbb")


def look(devices, env=None, **library):
    nvml = Nvml(devices, **library)
    return find(env or {}, load=lambda: nvml), nvml


def test_devices_come_with_architecture_and_memory():
    found, nvml = look([H200, A100])
    assert [(d.index, d.name, d.arch, d.memory_bytes) for d in found.devices] == [
        (0, "NVIDIA H200", "sm_90", 150_754_820_096),
        (1, "NVIDIA A100", "sm_80", 85_899_345_920),
    ]
    assert nvml.calls[0] == "nvmlInit_v2"
    assert nvml.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize("mask", ["1", "GPU-bbbb", "1,7,0", " 1 "])
def test_the_mask_selects_and_renumbers(mask):
    found, _ = look([H200, A100], {"CUDA_VISIBLE_DEVICES": mask})
    assert [(d.index, d.name) for d in found.devices] == [(0, "NVIDIA A100")]


@pytest.mark.parametrize("mask", ["", "-1", "9"])
def test_a_mask_that_hides_everything_is_the_reason(mask):
    found, _ = look([H200], {"CUDA_VISIBLE_DEVICES": mask})
    assert found.devices == ()
    assert f"CUDA_VISIBLE_DEVICES={mask} hides all 1" in found.reason


@pytest.mark.parametrize(("exists", "says"), [(True, "driver is loaded"), (False, "is not loaded")])
def test_without_the_library_the_reason_says_what_is_missing(tmp_path, exists, says):
    def load():
        raise OSError("cannot open shared object file")

    driver = tmp_path / "version"
    if exists:
        driver.touch()
    found = find({}, load=load, driver=driver)
    assert found.devices == ()
    assert "libnvidia-ml.so.1 is not installed" in found.reason
    assert says in found.reason


def test_a_broken_driver_is_a_reason_and_no_exception():
    found, _ = look([H200], fails="nvmlInit_v2")
    assert found.devices == ()
    assert found.reason == "no NVIDIA GPU: nvmlInit_v2: Driver/library version mismatch"
    found, nvml = look([H200], fails="nvmlDeviceGetName")
    assert "nvmlDeviceGetName" in found.reason
    assert nvml.calls[-1] == "nvmlShutdown"


def test_no_device_at_all():
    found, _ = look([])
    assert "lists none" in found.reason


def test_this_machine_is_looked_at_without_an_exception():
    found = find({})
    assert found.devices or found.reason
    assert Path("/proc").exists()
