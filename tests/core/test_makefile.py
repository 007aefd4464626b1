"""What `make serve` installs, from the hardware that a made-up machine shows. Nothing is run."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _recipe(machine: Path) -> str:
    argv = ["make", "-n", "serve", f"ROOT={machine}", f"VENV={machine}/venv"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _pci(machine: Path, vendor: str, device: str) -> None:
    folder = machine / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")


def _show(machine: Path, chip: str) -> None:
    if chip == "nvidia":
        (machine / "proc/driver/nvidia").mkdir(parents=True)
        (machine / "proc/driver/nvidia/version").touch()
    elif chip == "amd":
        (machine / "dev").mkdir()
        (machine / "dev/kfd").touch()
    elif chip != "none":
        _pci(machine, "0x1ae0", {"tpu": "0x0063", "network card": "0x0042"}[chip])


@pytest.mark.parametrize(
    ("chip", "wanted"),
    [
        ("none", []),
        ("network card", []),
        ("nvidia", ["backends/cuda", "backends/triton"]),
        ("amd", ["backends/rocm", "backends/triton"]),
        ("tpu", ["backends/tpu[tpu]"]),
    ],
)
def test_serve_installs_the_plugins_of_what_is_there(tmp_path, chip, wanted):
    _show(tmp_path, chip)
    recipe = _recipe(tmp_path)
    installed = re.findall(r"-e '([^']*)'", recipe)
    assert installed == ["core", "backends/torch", "backends/cpu", *wanted]
    names = " ".join(["cpu", *(folder.removeprefix("backends/") for folder in wanted)])
    assert f"the plugins of what is present: {names}" in recipe


def test_hardware_that_comes_later_is_noticed(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    (tmp_path / "venv/.serve").touch()
    assert "pip install" not in _recipe(tmp_path)
    _show(tmp_path, "nvidia")
    assert "backends/cuda" in _recipe(tmp_path)


def test_make_knows_the_chips_that_the_plugin_knows():
    found = re.search(r"^TPU_IDS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = ROOT / "backends/tpu/src/leadframe_tpu/detect.py"
    assert found is not None
    assert found[1].split() == re.findall(r'"(0x[0-9a-f]{4})": _Chip', known.read_text())
