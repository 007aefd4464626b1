"""Detection from a fake root, and that listing devices stays light."""

import subprocess
import sys

import pytest

from leadframe.errors import DeviceNotFound
from leadframe.platform import select_device
from leadframe_tpu import detect as module
from leadframe_tpu.detect import detect, is_usable


@pytest.fixture
def installed(monkeypatch):
    """Distributions that seem to be installed."""
    names = {"jax", "libtpu"}
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in names else None)
    return names


def add_chips(root, count=1, device="0x0063", files=("dev/vfio/0",)):
    for index in range(count):
        folder = root / f"sys/bus/pci/devices/0000:00:0{index}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("files", [("dev/vfio/0", "dev/vfio/vfio"), ("dev/accel0",)])
def test_chips_are_listed(tmp_path, installed, files):
    add_chips(tmp_path, 4, files=files)
    found = detect({}, tmp_path)
    assert [device.name for device in found.devices] == ["TPU v5e"] * 4
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert found.devices[0].memory_bytes == 16 * 2**30
    assert found.reason == "4 TPU v5e on the PCI bus"
    assert is_usable({}, tmp_path)


@pytest.mark.parametrize("name", ["TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"])
def test_chips_that_the_environment_hides_are_not_listed(tmp_path, installed, name):
    add_chips(tmp_path, 4)
    found = detect({name: "2, 3"}, tmp_path)
    assert [device.index for device in found.devices] == [0, 1]  # as JAX counts them
    assert found.reason == "4 TPU v5e on the PCI bus, 2 of them visible"
    assert len(detect({name: ""}, tmp_path).devices) == 4


def test_a_chip_may_be_two_devices(tmp_path, installed):
    add_chips(tmp_path, 2, device="0x0076")
    found = detect({}, tmp_path)
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert found.devices[3].memory_bytes == 96 * 2**30
    assert found.reason == "2 TPU tpu7x on the PCI bus"


def test_other_devices_of_the_vendor_are_not_tpus(tmp_path, installed):
    add_chips(tmp_path, device="0x0042")  # Google's network card
    assert not is_usable({}, tmp_path)


ABSENT = {
    "no TPU on the PCI bus": {"count": 0},
    "pass the devices into the container": {"files": ("dev/vfio/vfio",)},
    "libtpu is not installed": {"missing": "libtpu"},
    "v3 is older than the kernels can use": {"device": "0x0027"},
    "TPU_VISIBLE_CHIPS leaves none": {"env": {"TPU_VISIBLE_CHIPS": "1"}},
    "JAX_PLATFORMS is 'cpu'": {"env": {"JAX_PLATFORMS": "cpu"}},
    "although TPU_WORKER_ID is set": {"count": 0, "env": {"TPU_WORKER_ID": "0"}},
}


@pytest.mark.parametrize("reason", ABSENT)
def test_the_reason_is_one_line_and_names_the_remedy(tmp_path, installed, reason):
    case = dict(ABSENT[reason])
    env = case.pop("env", {})
    installed.discard(case.pop("missing", ""))
    add_chips(tmp_path, **case)
    found = detect(env, tmp_path)
    assert found.devices == ()
    assert reason in found.reason
    assert "\n" not in found.reason
    assert not is_usable(env, tmp_path)


@pytest.mark.parametrize("has_chip", [True, False])
def test_the_interpreter_is_there_only_when_it_is_named(tmp_path, installed, has_chip):
    add_chips(tmp_path, int(has_chip))
    found = detect({"LEADFRAME_DEVICE": "tpu:interpreter"}, tmp_path)
    assert found.devices == (module.INTERPRETED,)
    for env in ({}, {"LEADFRAME_DEVICE": "tpu"}, {"LEADFRAME_DEVICE": "tpu:0"}):
        assert module.INTERPRETED not in detect(env, tmp_path).devices


def test_who_asks_for_a_tpu_hears_of_the_interpreter(tmp_path, installed):
    assert "tpu:interpreter" in detect({"LEADFRAME_DEVICE": "tpu"}, tmp_path).reason
    assert "tpu:interpreter" not in detect({}, tmp_path).reason


def test_a_library_named_by_the_environment_is_enough(tmp_path, installed):
    installed.discard("libtpu")
    add_chips(tmp_path)
    found = detect({"TPU_LIBRARY_PATH": "/lib/libtpu.so"}, tmp_path)
    assert found.devices[0].name == "TPU v5e"


def test_without_jax_there_is_no_device(tmp_path, installed):
    installed.discard("jax")
    found = detect({}, tmp_path)
    assert found.devices == ()
    assert "pip install" in found.reason


def test_the_host_never_stands_in_for_a_chip_unasked():
    with pytest.raises(DeviceNotFound, match=r"device 'tpu' .*: no TPU on the PCI bus"):
        select_device("tpu", {})
    assert select_device("tpu:interpreter", {}).device == module.INTERPRETED


BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
{body}
heavy = sorted({{"torch", "jax", "leadframe_torch"}} & {{n for n, m in sys.modules.items() if m}})
print(",".join(heavy))
"""


def _modules_after(body, blocked):
    code = BLOCKED.format(body=body, blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_hooks_import_no_array_library():
    body = """
from leadframe_tpu import plugin
plugin.platform_info(), plugin.platform_detect({}), plugin.platform_options()
"""
    assert _modules_after(body, ["torch"]) == ""


def test_nothing_of_the_backend_needs_torch():
    body = """
import os, pkgutil, importlib
os.environ["JAX_PLATFORMS"] = "cpu"
import leadframe_tpu
for module in pkgutil.walk_packages(leadframe_tpu.__path__, "leadframe_tpu."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from leadframe.platform import Limits
from leadframe_tpu.create import create_backend
from leadframe_tpu.detect import INTERPRETED
backend = create_backend(INTERPRETED, {}, Limits())
import numpy as np
x = backend.upload(np.ones((2, 3), np.float32))
assert backend.download(backend.ops["linear"](x, x)).tolist() == [[3, 3], [3, 3]]
"""
    assert _modules_after(body, ["torch", "leadframe_torch"]) == "jax"
