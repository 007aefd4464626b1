"""Detection without drivers, creation errors, and what the hooks promise."""

import json
import os
import subprocess
import sys

import pytest
import torch

from leadframe.errors import DeviceNotFound, PluginLoadError, Unsupported
from leadframe.platform import KVLayerSpec, KVSpec, OpSpec
from leadframe.platform.info import Device
from leadframe_xpu import libraries, plugin
from leadframe_xpu.create import create_backend
from leadframe_xpu.detection import HOST_ARCH, detect
from leadframe_xpu.installed import Installed
from leadframe_xpu.ipex_kernels import HOST, XPU, IpexKernels
from leadframe_xpu.vllm_kernels import FACTS

GPU = Installed("2.14.0+xpu", True, None, "0.1.16.2")
CPU_TORCH = Installed("2.13.0+cpu", triton="3.9.0")
IPEX_HOST = Installed("2.8.0", ipex="2.8.0")


@pytest.fixture
def machine(tmp_path):
    """A file system with render nodes; call it with (vendor, device) pairs."""

    def make(*ids):
        drivers = tmp_path / "sys/bus/pci/drivers/xe"
        drivers.mkdir(parents=True)
        (tmp_path / "dev/dri").mkdir(parents=True)
        for index, (vendor, device) in enumerate(ids):
            node = tmp_path / f"sys/class/drm/renderD{128 + index}/device"
            node.mkdir(parents=True)
            (node / "vendor").write_text(f"{vendor}\n")
            (node / "device").write_text(f"{device}\n")
            (node / "driver").symlink_to(drivers)
            (tmp_path / f"dev/dri/renderD{128 + index}").touch()
        return tmp_path

    return make


ARC, OTHER_ARC, RADEON = ("0x8086", "0xe20b"), ("0x8086", "0x56a0"), ("0x1002", "0x744c")


def test_intel_gpus_are_found_and_say_which_kernels_serve(machine):
    found = detect({}, GPU, machine(RADEON, ARC, OTHER_ARC))
    assert [device.index for device in found.devices] == [0, 1]
    assert found.devices[0].name == "Intel GPU 8086:e20b (xe), kernels: vllm-xpu-kernels"
    assert found.reason.startswith("kernels: vllm-xpu-kernels (not ipex: ")


def test_the_affinity_mask_of_level_zero_is_followed(machine):
    root = machine(ARC, OTHER_ARC)
    found = detect({"ZE_AFFINITY_MASK": "1.0,1.1"}, GPU, root)
    assert [device.name.split()[2] for device in found.devices] == ["8086:56a0"]


def test_no_gpu_gives_one_line_with_every_reason(machine):
    found = detect({}, CPU_TORCH, machine(RADEON))
    assert found.devices == ()
    assert "\n" not in found.reason
    for part in ("no Intel GPU", "vllm-xpu-kernels: not installed", "IPEX ended", "3.9.0 has no"):
        assert part in found.reason


def test_a_gpu_without_a_torch_for_it_says_so(machine):
    found = detect({}, CPU_TORCH, machine(ARC))
    assert found.devices == ()
    assert "Intel GPU 8086:e20b is present" in found.reason
    assert "torch 2.13.0+cpu is not built for Intel GPUs" in found.reason


def test_a_node_that_may_not_be_opened_says_so(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = detect({}, GPU, machine(ARC))
    assert found.devices == ()
    assert "may not be opened: add this user to the group" in found.reason


def test_ipex_on_the_host_is_a_device_that_says_what_it_is(machine):
    (device,) = detect({}, IPEX_HOST, machine()).devices
    assert device.arch == HOST_ARCH
    assert "(-o target=host)" in device.name


def test_listing_imports_no_array_library():
    code = (
        "import os, sys; from leadframe_xpu import plugin; plugin.platform_info();"
        "plugin.platform_detect(os.environ); plugin.platform_options();"
        "plugin.platform_kernels('xpu');"
        "print([n for n in ('torch', 'triton', 'intel_extension_for_pytorch') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize(
    ("installed", "nodes", "kind"),
    [(IPEX_HOST, [], "test"), (IPEX_HOST, ["a GPU"], "accelerator"), (GPU, [], "accelerator")],
)
def test_auto_never_takes_the_host_for_an_accelerator(monkeypatch, installed, nodes, kind):
    monkeypatch.setattr(plugin, "read_installed", lambda: installed)
    monkeypatch.setattr(plugin, "render_nodes", lambda: nodes)
    assert plugin.platform_info().kind == kind


def test_the_host_is_never_taken_for_a_gpu():
    host = Device(0, "host", arch=HOST_ARCH)
    with pytest.raises(DeviceNotFound, match=r"no Intel GPU.*CPU build.*-o target=host"):
        create_backend(host, {}, IPEX_HOST)


def test_nothing_installed_lists_the_reasons():
    with pytest.raises(DeviceNotFound, match=r"on the gpu: kernels: none \(not vllm-xpu-kernels"):
        create_backend(Device(0, "gone"), {}, CPU_TORCH)


def test_asking_for_the_host_without_ipex_says_why():
    with pytest.raises(DeviceNotFound, match=r"IPEX ended with 2\.8; it needs torch 2.8"):
        create_backend(Device(0, "gone"), {"target": "host"}, CPU_TORCH)


def test_kernels_that_cannot_serve_are_refused_by_name():
    with pytest.raises(Unsupported, match=r"3\.9\.0 has no Intel backend"):
        create_backend(Device(0, "gone"), {"kernels": "triton"}, CPU_TORCH)


def test_a_gpu_that_torch_does_not_see_is_no_device():
    with pytest.raises(DeviceNotFound, match=r"sees 0 Intel GPUs.*intel-level-zero-gpu"):
        create_backend(Device(0, "gone"), {}, GPU)


def test_a_failing_import_of_ipex_is_a_load_error(monkeypatch):
    """Its version check calls os.exit, which does not exist."""

    hidden = []

    def fail(name):
        hidden.append(sys.modules["transformers"] is None)
        raise AttributeError("module 'os' has no attribute 'exit'")

    monkeypatch.setattr(libraries.importlib, "import_module", fail)
    monkeypatch.setitem(sys.modules, "transformers", plugin)
    with pytest.raises(PluginLoadError, match=f"next to torch {torch.__version__[:4]}"):
        libraries.load_ipex()
    assert hidden == [True]
    assert sys.modules["transformers"] is plugin


class TestOnAGpu:
    """As far as one gets without one: nothing below touches the device."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch, doubles):
        monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
        monkeypatch.setattr(libraries, "load_vllm_kernels", doubles.VllmXpu)

    def test_the_best_kernels_serve_with_graphs(self, monkeypatch):
        monkeypatch.setattr(torch.xpu, "XPUGraph", object, raising=False)
        backend = create_backend(Device(1, "second"), {}, GPU)
        assert backend.device == torch.device("xpu", 1)
        assert backend.ops["attention"].__self__.facts is FACTS
        assert (backend.caps.graph, backend.caps.simulated) == ("record", "")
        assert backend.caps.compute_dtypes == ("bfloat16", "float16")

    def test_graphs_can_be_turned_off(self, monkeypatch):
        monkeypatch.setattr(torch.xpu, "XPUGraph", object, raising=False)
        backend = create_backend(Device(0, "first"), {"graphs": "off"}, GPU)
        assert backend.caps.graph == "none"

    def test_a_torch_without_xpu_graphs_runs_eagerly(self, monkeypatch):
        monkeypatch.delattr(torch.xpu, "XPUGraph", raising=False)
        assert create_backend(Device(0, "first"), {}, GPU).caps.graph == "none"

    def test_torch_serves_when_asked(self):
        backend = create_backend(Device(0, "first"), {"kernels": "torch"}, GPU)
        assert "float32" in backend.caps.compute_dtypes
        assert backend.ranking.used == "torch"


class TestWhyNot:
    SPEC = OpSpec("attention", "float16", "float16", 64, 8, 2, 16)

    @pytest.mark.parametrize("facts", [FACTS, HOST.facts, XPU.facts], ids=lambda f: f.name)
    def test_what_they_can_do_has_no_objection(self, facts):
        assert facts.why_not(self.SPEC) is None

    @pytest.mark.parametrize(
        ("facts", "change", "reason"),
        [
            (FACTS, {"dtype": "float32", "kv_dtype": "float32"}, "not float32"),
            (XPU.facts, {"head_dim": 80}, "multiples of 64"),
            (XPU.facts, {"features": frozenset({"sinks"})}, "does not implement sinks"),
            (XPU.facts, {"kv_dtype": "float8_e4m3fn"}, "a cache of the queries' type"),
            (HOST.facts, {"block_size": 24}, "not 24"),
            (HOST.facts, {"op": "kv_append", "block_size": 256}, "not 256"),
        ],
    )
    def test_the_rest_has(self, facts, change, reason):
        fields = {name: getattr(self.SPEC, name) for name in self.SPEC.__slots__}
        assert reason in facts.why_not(OpSpec(**(fields | change)))

    def test_other_ops_are_none_of_their_business(self):
        assert FACTS.why_not(OpSpec("linear", "float32")) is None


def test_torch_serves_what_native_kernels_refuse(doubles, make_backend):
    from leadframe.platform import build_op_table

    backend = make_backend(IpexKernels(doubles.IpexXpu(), XPU))
    wanted = [OpSpec("attention", "float16", "float16", 80, 8, 2, 16)]
    table = build_op_table(backend, wanted, plugin.platform_kernels("xpu"), platform="xpu")
    (choice,) = [choice for choice in table.choices if choice.op == "attention"]
    assert choice.implementation == "torch"
    assert choice.passed_over == (("xpu", XPU.facts.why_not(wanted[0])),)


def test_torch_refuses_features_that_it_does_not_know():
    (offered,) = plugin.platform_kernels("xpu")
    assert "sinks" in offered.why_not(OpSpec("attention", features=frozenset({"sinks"})))
    assert plugin.platform_kernels("cuda") == ()


@pytest.mark.parametrize(("field", "value"), [("dtype", "float64"), ("block_size", 24)])
def test_a_cache_that_the_kernels_cannot_read_is_not_made(doubles, make_backend, field, value):
    backend = make_backend(IpexKernels(doubles.Untouchable(), HOST))
    fields = {"block_size": 16, "dtype": "float16"} | {field: value}
    with pytest.raises(Unsupported, match="kv_alloc is not supported"):
        backend.kv_alloc(KVSpec((KVLayerSpec(2, 64),), **fields), 4)
    assert backend.memory().used == 0


@pytest.mark.parametrize(("convention", "heads_first"), [(HOST, True), (XPU, False)])
def test_the_cache_is_laid_out_for_the_kernels(doubles, make_backend, convention, heads_first):
    backend = make_backend(IpexKernels(doubles.Untouchable(), convention))
    spec = KVSpec((KVLayerSpec(2, 64),), 16, "float16")
    (kv,) = backend.kv_alloc(spec, 5)
    assert kv.shape == (2, 5, 16, 2, 64)
    assert kv.is_contiguous() != heads_first
    assert (kv.transpose(2, 3) if heads_first else kv).is_contiguous()
    assert backend.memory().used == backend.kv_block_bytes(spec) * 5
    assert not kv.any()


def test_without_native_kernels_torch_does_everything(make_backend, cases):
    result, oracle, live = cases.run_case(
        make_backend(None), cases.CASES["mixed padded"], torch.float32
    )
    assert abs(result[live] - oracle[live]).max() < 1e-5


def test_capabilities_never_call_the_host_silicon(doubles, make_backend):
    assert make_backend(IpexKernels(doubles.IpexXpu(), XPU)).caps.simulated == "simulated"
