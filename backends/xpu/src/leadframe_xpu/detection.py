"""Finds Intel GPUs in the file system, without a driver call and without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leadframe.platform.info import Detection, Device
from leadframe_xpu.installed import Installed
from leadframe_xpu.ranking import rank

INTEL_VENDOR: Final = "0x8086"
HOST_ARCH: Final = "host"
"""`Device.arch` of the host, where IPEX's CPU build runs its kernels."""


@dataclass(frozen=True, slots=True)
class RenderNode:
    """One device that the kernel driver offers for compute.

    Attributes:
      node: its device file.
      pci_id: vendor and device, such as "8086:e20b".
      driver: the kernel driver, "i915" or "xe".
    """

    node: Path
    pci_id: str
    driver: str

    @property
    def is_open(self) -> bool:
        """Whether this user may open it."""
        return os.access(self.node, os.R_OK | os.W_OK)


def render_nodes(root: Path = Path("/")) -> list[RenderNode]:
    """Lists the render nodes of Intel GPUs, in the driver's order."""
    found = []
    for entry in sorted((root / "sys/class/drm").glob("renderD*")):
        vendor, device = (_text(entry / "device" / name) for name in ("vendor", "device"))
        if vendor != INTEL_VENDOR:
            continue
        driver = os.path.basename(os.path.realpath(entry / "device" / "driver"))
        pci_id = f"{vendor[2:]}:{device.removeprefix('0x')}"
        found.append(RenderNode(root / "dev/dri" / entry.name, pci_id, driver))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def selected(nodes: list[RenderNode], mask: str | None) -> list[RenderNode]:
    """Applies Level Zero's ZE_AFFINITY_MASK: indices, of which a part after a dot is a tile."""
    if not mask:
        return nodes
    wanted = [part.partition(".")[0] for part in mask.split(",")]
    indices = dict.fromkeys(int(part) for part in wanted if part.isdigit())
    return [nodes[index] for index in indices if index < len(nodes)]


def detect(env: Mapping[str, str], installed: Installed, root: Path = Path("/")) -> Detection:
    """Finds what `--device xpu` can use, and says which kernels serve and why not the others."""
    ranking = rank(installed, "gpu")
    nodes = selected(render_nodes(root), env.get("ZE_AFFINITY_MASK"))
    usable = [node for node in nodes if node.is_open]
    if usable and ranking.used is not None:
        devices = (_gpu(index, node, ranking.used) for index, node in enumerate(usable))
        return Detection(tuple(devices), ranking.summary())
    host = rank(installed, "host")
    if host.used is not None:
        name = f"host CPU, kernels of IPEX {installed.ipex} (-o target=host)"
        reason = f"{_absence(nodes, usable)}; IPEX's CPU build runs its kernels on the host"
        return Detection((Device(0, name, arch=HOST_ARCH),), reason)
    return Detection((), f"{_absence(nodes, usable)}; {ranking.summary()}")


def _gpu(index: int, node: RenderNode, kernels: str) -> Device:
    return Device(index, f"Intel GPU {node.pci_id} ({node.driver}), kernels: {kernels}")


def _absence(nodes: list[RenderNode], usable: list[RenderNode]) -> str:
    if not nodes:
        return "no Intel GPU (no render node of vendor 8086 in /sys/class/drm)"
    if not usable:
        return f"{nodes[0].node} may not be opened: add this user to the group that owns it"
    return f"an Intel GPU {nodes[0].pci_id} is present"
