"""Host to device through pinned memory, in chunks: the bus is busy while the next chunk is read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
_NUM_BUFFERS: Final = 2


class PinnedUploader:
    """Copies host tensors to a device through two pinned buffers.

    A page of ordinary memory must first be copied to a pinned one by the driver; doing it here,
    one chunk ahead, overlaps that copy with the transfer.

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

    def copy(self, host: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a device copy of a contiguous host tensor, converted on the device."""
        target = torch.empty(host.shape, dtype=dtype, device=self._device)
        if not host.numel():
            return target
        self._allocate()
        source, flat = host.reshape(-1), target.view(-1)
        step = max(1, self._chunk_bytes // host.element_size())
        for place, start in enumerate(range(0, source.numel(), step)):
            part = source[start : start + step]
            staged = self._stage(part, place % _NUM_BUFFERS)
            moved = staged.to(self._device, non_blocking=True)
            flat[start : start + step].copy_(moved)
            self._events[place % _NUM_BUFFERS].record()
        return target

    def _stage(self, part: Tensor, place: int) -> Tensor:
        """Copies a chunk to a buffer that the device is done with."""
        self._events[place].synchronize()
        bytes_view = self._buffers[place][: part.numel() * part.element_size()]
        staged = bytes_view.view(part.dtype)
        staged.copy_(part)
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
