"""The plugin's hooks, and what it knows about the host without importing anything heavy."""

import subprocess
import sys

import pytest

from leadframe.platform import CONTRACT, Capabilities, Device, Limits, OpSpec
from leadframe_cpu import plugin
from leadframe_cpu.backend import CpuBackend
from leadframe_cpu.cpu_info import CpuInfo, _cgroup_cores, cpu_info, usable_cores

_LIST = """
import sys
from leadframe_cpu import plugin
plugin.platform_info(); plugin.platform_options()
found = plugin.platform_detect({})
assert found.devices, found
heavy = {"torch", "numpy.linalg", "jax", "triton"} & set(sys.modules) - {"numpy.linalg"}
print(sorted(heavy))
"""


def test_listing_devices_imports_no_array_library():
    done = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plugin_says_what_it_is():
    info = plugin.platform_info()
    assert (info.name, info.kind, info.contract) == ("cpu", "host", CONTRACT)
    found = plugin.platform_detect({})
    assert found.devices[0].memory_bytes > 0
    assert "core" in found.reason


def test_without_torch_there_is_no_device(monkeypatch):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    found = plugin.platform_detect({})
    assert found.devices == ()
    assert "pip install torch" in found.reason


def test_options_are_checked():
    options = {spec.name: spec for spec in plugin.platform_options()}
    assert options["threads"].type("3") == 3
    with pytest.raises(ValueError, match="at least 1"):
        options["threads"].type("0")
    assert options["compile"].choices == ("eager", "step")
    assert options["native"].choices == ("auto", "on", "off")


def test_create_builds_the_backend():
    backend = plugin.platform_create(Device(0, "x"), {"threads": 2, "native": "on"}, Limits())
    assert isinstance(backend, CpuBackend)
    assert isinstance(backend.caps, Capabilities)
    assert backend.caps is backend.caps
    backend.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (OpSpec("attention", features=frozenset({"alibi"})), "alibi"),
        (OpSpec("linear", dtype="float16"), "float16"),
        (OpSpec("attention", kv_dtype="int8"), "int8"),
        (OpSpec("attention", block_size=24), "24"),
    ],
)
def test_what_is_not_claimed_is_refused_with_a_reason(native, spec, reason):
    assert reason in native.caps.why_not(spec)


def test_what_is_claimed_is_not_refused(native):
    for dtype in native.caps.compute_dtypes:
        for block_size in native.caps.block_sizes:
            features = native.caps.attention_features
            spec = OpSpec("attention", dtype, dtype, block_size=block_size, features=features)
            assert native.caps.why_not(spec) is None


def test_float32_comes_first(native):
    assert native.caps.compute_dtypes == ("float32", "bfloat16")


X86 = "processor\t: 0\nmodel name\t: Some CPU @ 3GHz\nflags\t\t: fpu avx2 avx512_bf16\n\nflags: x"
ARM = "processor : 0\nFeatures : fp asimd bf16\nHardware : Board\n"


@pytest.mark.parametrize(
    ("text", "name", "flag"), [(X86, "Some CPU @ 3GHz", "avx512_bf16"), (ARM, "Board", "bf16")]
)
def test_cpu_info_reads_both_spellings(tmp_path, text, name, flag):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    info = cpu_info(path)
    assert info.name == name
    assert flag in info.flags
    assert info.has_bf16


def test_cpu_info_survives_a_missing_file(tmp_path):
    info = cpu_info(tmp_path / "absent")
    assert info.name
    assert not info.flags
    assert not CpuInfo("x", "y", frozenset({"avx2"})).has_bf16


def test_cgroup_quotas_of_both_versions(tmp_path):
    assert _cgroup_cores(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert _cgroup_cores(tmp_path) == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert _cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000")
    assert _cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000")
    assert _cgroup_cores(tmp_path) == 2.5


def test_usable_cores_respects_affinity(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert usable_cores() == 1


def test_memory_respects_rlimit(native, monkeypatch):
    import resource

    before = native.memory()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, -1))
    assert native.memory().total == before.total
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, -1))
    limited = native.memory()
    assert (limited.total, limited.free) == (1 << 20, 0)
