"""Memory of the chips, and what the backend itself holds where no chip can tell."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import MemoryInfo


class Ledger:
    """Counts the bytes of what the backend made, and can delete it."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0
        self._arrays: dict[int, weakref.ref[jax.Array]] = {}

    def hold(self, array: jax.Array) -> jax.Array:
        """Counts an array until it is collected."""
        size, key = stored_bytes(array), id(array)
        self.add(size)
        self._arrays[key] = weakref.ref(array)
        weakref.finalize(array, self._drop, key, size)
        return array

    def add(self, size: int) -> None:
        """Counts bytes; a negative number takes them off."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def clear(self) -> None:
        """Deletes every array that is still held."""
        for reference in list(self._arrays.values()):
            array = reference()
            if array is not None and not array.is_deleted():
                size = stored_bytes(array)
                array.delete()
                self._drop(id(array), size)

    def _drop(self, key: int, size: int) -> None:
        if self._arrays.pop(key, None) is not None:
            self.add(-size)


def stored_bytes(array: jax.Array) -> int:
    """Returns the bytes of an array over all devices, copies included."""
    shard: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    size = array.dtype.itemsize * len(array.sharding.device_set)
    for length in shard:
        size *= length
    return size


class ChipMemory:
    """What the chips report. Sums over them, but free memory is what the fullest one has."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices

    def read(self, ledger: Ledger) -> MemoryInfo:
        """Reads it now."""
        stats = [device.memory_stats() for device in self._devices]
        free = min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
        return MemoryInfo(
            total=sum(s["bytes_limit"] for s in stats),
            free=free * len(stats),
            used=sum(s["bytes_in_use"] for s in stats),
            peak=sum(s["peak_bytes_in_use"] for s in stats),
        )


class PretendMemory:
    """What an interpreted chip would have: a given size, or what the host has."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    def read(self, ledger: Ledger) -> MemoryInfo:
        """Takes what the backend holds off the limit."""
        if self._limit is not None:
            return MemoryInfo(self._limit, self._limit - ledger.used, ledger.used, ledger.peak)
        total, free = host_memory()
        return MemoryInfo(total, free, ledger.used, ledger.peak)
