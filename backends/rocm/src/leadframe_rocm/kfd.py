"""AMD GPUs as the kernel driver's topology tells them: no HIP context, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from leadframe.platform.info import Device
from leadframe_triton.plugin import Found, environment_mask, visible

_SYSFS: Final = Path("/sys")


def find(env: Mapping[str, str], sysfs: Path = _SYSFS) -> Found:
    """Lists the GPUs that this process may see.

    Args:
      env: the environment, for the three masks that ROCm reads.
      sysfs: where the kernel's file system is mounted.
    """
    nodes = sysfs / "class" / "kfd" / "kfd" / "topology" / "nodes"
    if not nodes.is_dir():
        return Found((), "no AMD GPU: the amdgpu kernel driver offers no compute device (/dev/kfd)")
    listed = list(_gpus(nodes, sysfs))
    if not listed:
        return Found((), "no AMD GPU: the driver is loaded and lists none that computes")
    devices, ids = tuple(device for device, _ in listed), [name for _, name in listed]
    # ROCR's mask comes first; HIP's counts what it left, and CUDA's is read where HIP's is unset.
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        mask = environment_mask(env, *names)
        left = visible(devices, mask, ids)
        if not left:
            return Found((), f"{' or '.join(names)}={mask} hides all {len(devices)} AMD GPUs")
        devices, ids = left, ids[: len(left)] if mask is None else [""] * len(left)
    return Found(devices)


def _gpus(nodes: Path, sysfs: Path) -> Iterator[tuple[Device, str]]:
    count = 0
    for node in sorted(nodes.iterdir(), key=lambda path: int(path.name)):
        facts = _properties(node / "properties")
        if facts.get("simd_count", 0) and facts.get("gfx_target_version", 0):
            arch = gfx_name(facts["gfx_target_version"])
            name = _product(sysfs, facts.get("drm_render_minor", 0)) or f"AMD {arch}"
            yield Device(count, name, _memory(node), arch), f"GPU-{facts.get('unique_id', 0):016x}"
            count += 1


def _properties(path: Path) -> dict[str, int]:
    """The file's lines of a name and a number; empty where it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def gfx_name(version: int) -> str:
    """The architecture of a `gfx_target_version`: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _memory(node: Path) -> int | None:
    """Bytes of the node's own memory; None where the driver does not tell."""
    banks = sorted((node / "mem_banks").glob("*/properties"))
    sizes = [_properties(bank).get("size_in_bytes", 0) for bank in banks]
    return sum(sizes) or None


def _product(sysfs: Path, minor: int) -> str:
    try:
        return (sysfs / f"class/drm/renderD{minor}/device/product_name").read_text().strip()
    except OSError:
        return ""
