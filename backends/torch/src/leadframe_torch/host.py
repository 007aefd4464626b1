"""The host as a device layer: its memory is what this process may still take."""

from __future__ import annotations

import resource

import torch

from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import MemoryInfo
from leadframe_torch.devices import Holdings
from leadframe_torch.graphs import GraphFactory


class HostLayer:
    """The host's memory within cgroup and rlimit; nothing to wait for, nothing cached.

    Args:
      shared_by: ranks that share the host; each gets its part.
    """

    def __init__(self, shared_by: int = 1) -> None:
        self._shared_by = shared_by
        self.device = torch.device("cpu")
        self.graphs: GraphFactory | None = None

    def memory(self, held: Holdings) -> MemoryInfo:
        """Reads the memory that this process may use."""
        total, free = host_memory()
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and limit < total:
            total, free = limit, min(free, max(0, limit - _address_space()))
        ranks = self._shared_by
        return MemoryInfo(total // ranks, free // ranks, held.current, held.peak)

    def synchronize(self) -> None:
        """Returns at once: host work is done when its call returns."""

    def release_cached(self) -> None:
        """Does nothing: freed memory goes back by itself."""


def _address_space() -> int:
    """Bytes of this process's address space; what RLIMIT_AS counts."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
