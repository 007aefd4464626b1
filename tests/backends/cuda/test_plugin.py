"""The plugin that CUDA and ROCm share: what it lists, refuses and builds. No GPU needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leadframe.errors import DeviceNotFound, Unsupported
from leadframe.platform import Limits
from leadframe.platform.info import Device
from leadframe.platform.selection import create_backend, parse_options, select_device
from leadframe_triton import interpreter
from leadframe_triton.plugin import Found, GpuPlugin, TorchBuild, visible

NAMES = ("cuda", "rocm")
ROOT = Path(__file__).parents[3]
GPU = Device(0, "NVIDIA H200", 10**11, "sm_90")


def plugin_for(*devices, reason="", library="libtorch_cpu.so"):
    return GpuPlugin(
        name="cuda",
        summary="test",
        distribution="leadframe-cuda",
        version="0.1.0",
        find=lambda env: Found(devices, reason),
        build=TorchBuild(library, "install another torch"),
    )


def run(*arguments, timeout=280, **env):
    """Runs Python in a process of its own: Triton has one mode per process."""
    clean = {name: value for name, value in os.environ.items() if name != interpreter.SWITCH}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_kit(device, folder, *arguments):
    """Runs the conformance kit, which must pass; returns its report."""
    report = folder / "report.json"
    command = ["-m", "leadframe.cli.main", "conformance", device, *arguments]
    result = run(*command, "--report", str(report))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return json.loads(report.read_text())


# --- detection ------------------------------------------------------------------------------


def test_a_gpu_that_torch_and_the_kernels_know_is_ready():
    found = plugin_for(GPU).platform_detect({})
    assert found.devices == (GPU,)
    assert found.reason == "1 x NVIDIA H200"


def test_no_gpu_gives_the_vendor_s_reason():
    assert (
        plugin_for(reason="no NVIDIA GPU: because").platform_detect({}).reason.endswith("because")
    )


def test_a_gpu_that_this_torch_cannot_drive_is_no_device():
    found = plugin_for(GPU, library="libtorch_missing.so").platform_detect({})
    assert found.devices == ()
    assert "NVIDIA H200 is present, but torch" in found.reason
    assert "install another torch" in found.reason


def test_a_gpu_without_prepared_kernels_is_no_device():
    found = plugin_for(Device(0, "Tesla P100", 1, "sm_60")).platform_detect({})
    assert found.devices == ()
    assert "Tesla P100 is sm_60; the kernels are prepared for sm_80" in found.reason


@pytest.mark.parametrize(
    "env", [{"LEADFRAME_DEVICE": "cuda:interpreter"}, {"TRITON_INTERPRET": "1"}]
)
def test_the_interpreter_is_listed_only_when_it_is_asked_for(env):
    (device,) = plugin_for(GPU).platform_detect(env).devices
    assert (device.name, device.arch) == ("interpreter", "interpreter")
    assert plugin_for().platform_detect({"LEADFRAME_DEVICE": "cuda"}).devices == ()
    assert plugin_for().platform_detect({"TRITON_INTERPRET": "0"}).devices == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_without_gpu_is_told_why(name):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    with pytest.raises(DeviceNotFound, match=r"finds no device: .*(NVIDIA|AMD) GPU") as caught:
        select_device(name, hidden)
    assert f"{name}:interpreter interprets its kernels on the host" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_listing_devices_is_fast_and_imports_no_array_library(name):
    script = f"""
import sys, time
from leadframe.platform.discovery import find_entry_point, installed_entry_points, load_plugin
points = installed_entry_points()
start = time.process_time()
plugin = load_plugin(find_entry_point({name!r}, points))
plugin.info()
spent = time.process_time() - start
plugin.detect({{}})
print(spent, [name for name in ("torch", "triton") if name in sys.modules])
"""
    result = run("-c", script)
    spent, _, modules = result.stdout.strip().partition(" ")
    assert modules == "[]", result.stderr
    assert float(spent) < 0.05


def test_masks_hide_what_follows_an_unknown_entry():
    devices = [Device(i, f"g{i}") for i in range(3)]
    ids = ["GPU-a1", "GPU-a2", "GPU-b3"]
    assert [d.name for d in visible(devices, None, ids)] == ["g0", "g1", "g2"]
    assert [d.name for d in visible(devices, "2,0", ids)] == ["g2", "g0"]
    assert [d.index for d in visible(devices, "2,0", ids)] == [0, 1]
    assert [d.name for d in visible(devices, "1,9,0", ids)] == ["g1"]
    assert [d.name for d in visible(devices, "GPU-b", ids)] == ["g2"]
    assert visible(devices, "GPU-a", ids) == (), "an ambiguous id names no device"


# --- options and modes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_options_are_what_the_settings_take(name):
    from leadframe_triton.backend import Settings

    selection = select_device(f"{name}:interpreter", {})
    values = parse_options(selection.plugin, {"graphs": "off", "batch_invariant": "on"})
    settings = Settings(**values)
    assert (settings.graphs, settings.batch_invariant, settings.tune) == (False, True, False)
    with pytest.raises(Exception, match="it must be on or off"):
        parse_options(selection.plugin, {"tune": "maybe"})


def test_a_process_that_compiles_does_not_interpret(monkeypatch):
    monkeypatch.delenv(interpreter.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1 before it starts"):
        create_backend(select_device("cuda:interpreter", {}))


def test_a_process_that_interprets_does_not_serve_a_gpu(monkeypatch):
    monkeypatch.setenv(interpreter.SWITCH, "1")
    plugin = plugin_for(GPU)
    values = {spec.name: spec.default for spec in plugin.platform_options()}
    with pytest.raises(Unsupported, match="unset it"):
        plugin.platform_create(GPU, values, Limits())


def test_a_gpu_that_torch_does_not_see_is_not_found(monkeypatch):
    monkeypatch.delenv(interpreter.SWITCH, raising=False)
    plugin = plugin_for(GPU)
    values = {spec.name: spec.default for spec in plugin.platform_options()}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceNotFound, match=r"torch .* cannot use it: it sees \d devices"):
        plugin.platform_create(GPU, values, Limits())


# --- the kernels in the interpreter ---------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(300)
def test_the_kit_passes_at_evidence_level_interpreter(name, tmp_path):
    """A few cases; CI runs `leadframe conformance NAME:interpreter` whole."""
    cases = ["B.exact*", "I.*"]
    if name == "cuda":  # the kernels are the same ones
        cases += ["A.load*", "B.attention[*poison*", "C.*", "E.logits[eager]", "F.*"]
    picks = [text for case in cases for text in ("--case", case)]
    found = run_kit(f"{name}:interpreter", tmp_path, *picks)
    assert found["evidence"] == "interpreter"
    assert len(found["results"]) > 15


@pytest.mark.timeout(300)
def test_batch_invariant_mode_is_claimed_and_holds(tmp_path):
    found = run_kit("cuda:interpreter", tmp_path, "-o", "batch_invariant=on", "--case", "F.*")
    assert found["capabilities"]["batch_invariant"] is True


# --- structure ------------------------------------------------------------------------------


def test_cuda_and_rocm_share_no_copied_code():
    """Runs of six code lines that both distributions have, imports and docstrings aside."""
    runs = {}
    for name in NAMES:
        runs[name] = set()
        for path in (ROOT / f"backends/{name}/src").rglob("*.py"):
            if path.name in ("compile_check.py", "plugin.py"):
                continue  # declarations: the data in which they differ
            text = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith(("import ", "from ", ")"))]
            runs[name] |= {tuple(lines[i : i + 6]) for i in range(len(lines) - 5)}
    assert not runs["cuda"] & runs["rocm"]


@pytest.mark.parametrize("name", NAMES)
def test_a_vendor_s_distribution_stays_thin(name):
    files = (ROOT / f"backends/{name}/src").rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) < 200
