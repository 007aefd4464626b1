"""Facts about the host processor, read from the system without importing anything heavy."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_FIELDS = {"flags": "flags", "features": "flags", "model name": "name", "hardware": "name"}
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """One processor model.

    Attributes:
      name: the vendor's product name.
      arch: the machine's architecture, such as "x86_64".
      flags: instruction-set extensions, in the kernel's spelling.
    """

    name: str
    arch: str
    flags: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Whether the processor multiplies bfloat16 by itself."""
        return bool(self.flags & _BF16_FLAGS)


@lru_cache(maxsize=4)
def cpu_info(path: Path = Path("/proc/cpuinfo")) -> CpuInfo:
    """Reads the first processor's name and flags; empty where the system does not tell."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        field = _FIELDS.get(key.strip().lower())
        if field and field not in found:
            found[field] = value.strip()
    name = found.get("name") or platform.processor() or platform.machine()
    return CpuInfo(name, platform.machine(), frozenset(found.get("flags", "").split()))


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, cut to the cgroup's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = _cgroup_cores(Path("/sys/fs/cgroup"))
    return max(1, count if quota is None else min(count, int(quota)))


def _cgroup_cores(root: Path) -> float | None:
    """The cgroup's processor quota in cores, version 2 or 1; None without one."""
    try:
        text = (root / "cpu.max").read_text().split()
    except OSError:
        text = _v1_quota(root / "cpu")
    try:
        quota, period = (float(part) for part in text)
    except ValueError:  # absent, or the word "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def _v1_quota(folder: Path) -> list[str]:
    try:
        return [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
    except OSError:
        return []
