"""Finds TPUs without importing JAX: from the PCI bus, device files and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from leadframe.platform.info import Detection, Device

INTERPRETED: Final = Device(0, "interpreter", arch="interpreter")
"""The device that stands for Pallas' interpreter on the host. It exists only when it is named."""

_GOOGLE: Final = "0x1ae0"
_GIB: Final = 2**30
_VISIBLE: Final = "TPU_VISIBLE_CHIPS"


@dataclass(frozen=True, slots=True)
class _Chip:
    """One generation.

    Attributes:
      arch: its name.
      memory_bytes: memory of one of its devices.
      devices: how many devices JAX makes of a chip.
    """

    arch: str
    memory_bytes: int
    devices: int = 1


_TOO_OLD: Final = "v3"
"""Its matrix unit takes no bfloat16 from a kernel, says the compiler."""

_GENERATIONS: Final = {
    "0x0027": _Chip(_TOO_OLD, 16 * _GIB, 2),
    "0x005e": _Chip("v4", 32 * _GIB),
    "0x0062": _Chip("v5p", 95 * _GIB),
    "0x0063": _Chip("v5e", 16 * _GIB),
    "0x006f": _Chip("v6e", 32 * _GIB),
    "0x0076": _Chip("tpu7x", 96 * _GIB, 2),
}
"""PCI device id → chip. Source: jax/_src/hardware_utils.py, ids only."""


def detect(env: Mapping[str, str], root: Path = Path("/")) -> Detection:
    """Lists the TPU chips that this process could open.

    Args:
      env: the process environment.
      root: where `/sys` and `/dev` are.
    """
    if find_spec("jax") is None:
        return Detection((), "jax is not installed; run: pip install 'jax[tpu]>=0.10.2,<0.11'")
    named = env.get("LEADFRAME_DEVICE", "")
    if named == f"tpu:{INTERPRETED.name}":
        return Detection((INTERPRETED,), "kernels run in Pallas' interpreter on the host")
    present = _chips(root)
    chips = _visible(env, present)
    why_absent = _why_absent(env, root, present)
    if why_absent is not None:
        hint = "; tpu:interpreter runs its kernels on the host, for tests" if named == "tpu" else ""
        return Detection((), why_absent + hint)
    each = [chip for chip in chips for _ in range(chip.devices)]
    devices = tuple(
        Device(index, f"TPU {chip.arch}", chip.memory_bytes, chip.arch)
        for index, chip in enumerate(each)
    )
    kept = f", {len(chips)} of them visible" if len(chips) < len(present) else ""
    return Detection(devices, f"{len(present)} TPU {present[0].arch} on the PCI bus{kept}")


def is_usable(env: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether this process could open a TPU."""
    return _why_absent(env, root, _chips(root)) is None


def _why_absent(env: Mapping[str, str], root: Path, chips: list[_Chip]) -> str | None:
    """Says in one line why no TPU can be used; None if one can."""
    if not chips:
        hint = _environment_hint(env)
        return f"no TPU on the PCI bus{hint}"
    if chips[0].arch == _TOO_OLD:
        return f"TPU {_TOO_OLD} is older than the kernels can use; they run on v4 and later"
    if not _has_device_file(root):
        return (
            f"{len(chips)} TPU {chips[0].arch} on the PCI bus, but neither /dev/accel* nor "
            "/dev/vfio/* can be seen; pass the devices into the container"
        )
    if find_spec("libtpu") is None and not env.get("TPU_LIBRARY_PATH"):
        return "libtpu is not installed; run: pip install libtpu"
    if not _visible(env, chips):
        return f"{_VISIBLE} leaves none of the {len(chips)} TPU {chips[0].arch}; unset it"
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return f"JAX_PLATFORMS is {platforms!r}, which hides the TPU; unset it"
    return None


def _visible(env: Mapping[str, str], chips: list[_Chip]) -> list[_Chip]:
    """Those that libtpu will open: all, or the ones whose numbers the environment lists."""
    listed = env.get(_VISIBLE) or env.get("TPU_VISIBLE_DEVICES", "")
    numbers = [part.strip() for part in listed.split(",")]
    if not all(number.isdecimal() for number in numbers):
        return chips
    return [chips[int(number)] for number in numbers if int(number) < len(chips)]


def _environment_hint(env: Mapping[str, str]) -> str:
    """Names what claims that this is a TPU host."""
    named = sorted(name for name in env if name.startswith(("TPU_ACCELERATOR", "TPU_WORKER")))
    return f", although {named[0]} is set" if named else ""


def _chips(root: Path) -> list[_Chip]:
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(folder / "vendor") == _GOOGLE:
            chip = _GENERATIONS.get(_text(folder / "device"))
            if chip is not None:
                found.append(chip)
    return found


def _has_device_file(root: Path) -> bool:
    names = [path.name for path in (root / "dev").glob("accel*")]
    groups = [path.name for path in (root / "dev/vfio").glob("*")]
    return any(name[5:].isdigit() for name in names) or any(g.isdigit() for g in groups)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
