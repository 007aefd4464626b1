"""Host to device through pinned memory, in chunks: the bus is busy while the next chunk is read."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadframe_torch.dtypes import torch_dtype

CHUNK_BYTES: Final = 32 << 20
_NUM_BUFFERS: Final = 2


class PinnedUploader:
    """Copies host arrays to a device through two pinned buffers.

    A page of ordinary memory, or of a mapped file, must first be copied to a pinned one by the
    driver; doing it here, one chunk ahead, overlaps that copy with the transfer.

    Args:
      device: where the copies go.
      chunk_bytes: size of a buffer.
      pin: False for tests on a machine without a device.
    """

    def __init__(
        self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES, pin: bool = True
    ) -> None:
        self._device, self._pin, self._chunk_bytes = device, pin, chunk_bytes
        self._module: Any = torch.get_device_module(device)
        self._buffers: list[Tensor] = []
        self._events: list[Any] = []

    def copy(self, host: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Returns a device copy of an array, converted on the device; None keeps its type."""
        source_dtype = torch_dtype(host.dtype.name)
        target = torch.empty(host.shape, dtype=dtype or source_dtype, device=self._device)
        if not host.size:
            return target
        self._allocate()
        source, flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8), target.view(-1)
        step = self._chunk_bytes // source_dtype.itemsize * source_dtype.itemsize
        for chunk, start in enumerate(range(0, source.size, step)):
            place = chunk % _NUM_BUFFERS
            staged = self._stage(source[start : start + step], place).view(source_dtype)
            first = start // source_dtype.itemsize
            moved = staged.to(self._device, non_blocking=True)
            flat[first : first + staged.numel()].copy_(moved)
            # Named, since the thread's current stream may be another device's.
            self._events[place].record(self._module.current_stream(self._device))
        return target

    def _stage(self, part: npt.NDArray[np.uint8], place: int) -> Tensor:
        """Copies a chunk to a buffer that the device is done with."""
        self._events[place].synchronize()
        staged = self._buffers[place][: part.size]
        np.copyto(staged.numpy(), part)
        return staged

    def _allocate(self) -> None:
        if self._buffers:
            return
        for _ in range(_NUM_BUFFERS):
            buffer = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pin)
            self._buffers.append(buffer)
            self._events.append(self._module.Event())

    def close(self) -> None:
        """Waits for the last chunk and frees the buffers."""
        for event in self._events:
            event.synchronize()
        self._buffers, self._events = [], []
