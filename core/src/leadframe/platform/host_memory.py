"""Memory that this process may use on the host: the smaller of the machine and its cgroup."""

from __future__ import annotations

from pathlib import Path

import psutil

_V2 = ("memory.max", "memory.current")
_V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def host_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Returns (total, free) bytes of host memory that this process may use.

    Args:
      root: where the cgroup file system is mounted.
    """
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit_name, usage_name in (_V2, _V1):
        limit, usage = _read(root / limit_name), _read(root / usage_name)
        if limit is not None and limit < total:
            total = limit
            free = min(free, max(0, limit - (usage or 0)))
    return total, free


__all__ = ["host_memory"]
