"""The host as a device layer, for the kernels of IPEX's CPU build."""

from __future__ import annotations

import torch

from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import MemoryInfo
from leadframe_torch import GraphFactory, Holdings


class HostLayer:
    """Host memory within its cgroup; nothing to wait for, nothing cached."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graphs: GraphFactory | None = None

    def memory(self, held: Holdings) -> MemoryInfo:
        """Reads the memory that this process may use."""
        total, free = host_memory()
        return MemoryInfo(total, free, held.current, held.peak)

    def synchronize(self) -> None:
        """Returns at once: host work is done when its call returns."""

    def release_cached(self) -> None:
        """Does nothing: freed memory goes back by itself."""
