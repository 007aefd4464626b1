"""The device layer: the few facts about a device that torch names differently for each kind.

`TorchBackend` asks a `DeviceLayer` and never names a kind of device itself. `AcceleratorLayer`
serves every device whose torch module looks like the usual ones (CUDA, HIP, XPU, and third
parties who follow them), on torch 2.8 to current.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from leadframe.errors import DeviceLost, DeviceOOM
from leadframe.platform.info import MemoryInfo
from leadframe_torch.graphs import GraphFactory


class Holdings:
    """Bytes of the tensors that a backend handed out and that are still alive.

    What a device without allocator statistics reports as used.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._finalizers: dict[int, Callable[[], object]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor until it dies or is released."""
        key, size = id(tensor), tensor.numel() * tensor.element_size()
        self.current += size
        self.peak = max(self.peak, self.current)
        finalizer = weakref.finalize(tensor, self._drop, key, size)
        finalizer.atexit = False
        self._finalizers[key] = finalizer

    def release(self, tensor: torch.Tensor) -> None:
        """Stops counting a tensor whose memory is being freed by hand."""
        finalizer = self._finalizers.get(id(tensor))
        if finalizer is not None:
            finalizer()

    def _drop(self, key: int, size: int) -> None:
        del self._finalizers[key]
        self.current -= size


class DeviceLayer(Protocol):
    """What differs between kinds of torch devices.

    Attributes:
      device: where tensors are created.
      graphs: captures graphs, or None where the device has none.
    """

    device: torch.device
    graphs: GraphFactory | None

    def memory(self, held: Holdings) -> MemoryInfo:
        """Reads the device's memory; `held` is what the backend counted itself."""

    def synchronize(self) -> None:
        """Waits for all work."""

    def release_cached(self) -> None:
        """Gives freed memory back to the device, where an allocator keeps it."""


class AcceleratorLayer:
    """A device whose torch module has the common functions, such as `mem_get_info`.

    A third party's module may lack some of them; then the backend's own count is reported.
    """

    def __init__(self, device: torch.device, graphs: GraphFactory | None = None) -> None:
        self.device, self.graphs = device, graphs
        self._module: Any = torch.get_device_module(device)

    def memory(self, held: Holdings) -> MemoryInfo:
        """Reads the device's memory."""
        module, device = self._module, self.device
        free, total = module.mem_get_info(device)
        if not hasattr(module, "memory_allocated"):
            return MemoryInfo(total, free, held.current, held.peak)
        used, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        # what the allocator keeps for reuse is free for this process
        reserved = module.memory_reserved(device)
        return MemoryInfo(total, free + reserved - used, used, peak)

    def synchronize(self) -> None:
        """Waits for all work."""
        self._module.synchronize(self.device)

    def release_cached(self) -> None:
        """Empties the allocator's cache."""
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()


_OOM_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "STATUS_ALLOC_FAILED",  # cuBLAS and its like, for a workspace
)
_LOST_ERRORS: tuple[type[BaseException], ...] = tuple(
    error for name in ("AcceleratorError",) if (error := getattr(torch, name, None)) is not None
)


@contextmanager
def device_errors(layer: DeviceLayer, held: Holdings, phase: str, requested: int) -> Iterator[None]:
    """Turns torch's memory and device errors into the contract's.

    Args:
      layer: tells how much was free.
      held: the backend's count.
      phase: what is being done, for the message.
      requested: bytes asked for; 0 when unknown.

    Raises:
      DeviceOOM: torch ran out of memory.
      DeviceLost: torch reports that the device failed.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceOOM(requested, layer.memory(held).free, phase) from error
    except RuntimeError as error:
        # Memory first: a driver that has none left for a graph says so as it tells other failures.
        if any(words in str(error) for words in _OOM_WORDS):
            raise DeviceOOM(requested, layer.memory(held).free, phase) from error
        if isinstance(error, _LOST_ERRORS):
            raise DeviceLost(f"{layer.device} failed during {phase}: {error}") from error
        raise
