"""Memory of the chips, and what the backend itself holds where no chip can tell."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import MemoryInfo


class Ledger:
    """Counts the bytes of what the backend made, and can delete it."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0
        self.scratch = 0
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

    def share_scratch(self, size: int) -> int:
        """Counts the scratch of a program; returns by how much it is the largest so far.

        Programs run one at a time, so all of them share what the largest needs.
        """
        growth = max(0, size - self.scratch)
        self.scratch += growth
        return growth

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
    """What the chips report. Sums over them, but free memory is what the fullest one has.

    A program's scratch is no allocation to libtpu: it is *reserved*, in figures of its own, which
    neither what is in use nor its peak contains. Where they are absent, what the compiler said of
    the largest program stands for them.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices

    def read(self, ledger: Ledger) -> MemoryInfo:
        """Reads it now."""
        stats = [device.memory_stats() for device in self._devices]
        used = [s["bytes_in_use"] + s.get("bytes_reserved", 0) for s in stats]
        free = min(s["bytes_limit"] - held for s, held in zip(stats, used, strict=True))
        reserved = max(_total(stats, "peak_bytes_reserved"), ledger.scratch)
        return MemoryInfo(
            total=_total(stats, "bytes_limit"),
            free=free * len(stats),
            used=sum(used),
            peak=max(_total(stats, "peak_bytes_in_use"), _total(stats, "bytes_in_use") + reserved),
        )


def _total(stats: Sequence[Mapping[str, int]], name: str) -> int:
    return sum(chip.get(name, 0) for chip in stats)


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
