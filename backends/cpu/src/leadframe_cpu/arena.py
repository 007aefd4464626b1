"""Memory for the tensors of recorded steps.

A recorded step keeps the addresses of its intermediate tensors. Only one step runs at a time, so
all recordings of a backend lay theirs over the same slabs; within one, a tensor's place is free
again as soon as the tensor dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT: Final = 64
_SLAB_BYTES: Final = 8 << 20

_Slab = npt.NDArray[np.uint8]


class Arena:
    """The slabs that every recording uses.

    Attributes:
      num_bytes: their size together.
    """

    def __init__(self) -> None:
        self.slabs: list[_Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def grow(self, size: int) -> None:
        """Adds a slab of at least `size` bytes."""
        self.slabs.append(np.empty(max(size, _SLAB_BYTES), np.uint8))


class Region:
    """One recording's use of the arena: a list of free ranges, first fit."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free: list[tuple[int, int, int]] = []  # (slab, start, end), in order
        self._known = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor whose memory comes back when the last view of it dies."""
        count = prod(shape)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT
        slab, start = self._take(size)
        place = self._arena.slabs[slab][start : start + count * dtype.itemsize]
        # torch keeps this array until no tensor uses the memory: its end is the memory's end
        weakref.finalize(place, self._give, (slab, start, start + size)).atexit = False
        return torch.from_numpy(place).view(dtype).view(tuple(shape))

    def _take(self, size: int) -> tuple[int, int]:
        for index, (slab, start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(slab, start + size, end)][: end - start > size]
                return slab, start
        if self._known == len(self._arena.slabs):
            self._arena.grow(size + _ALIGNMENT)
        slab = self._known
        self._known += 1
        whole = self._arena.slabs[slab]
        first = -whole.ctypes.data % _ALIGNMENT
        self._give((slab, first, whole.nbytes))
        return self._take(size)

    def _give(self, range_: tuple[int, int, int]) -> None:
        """Puts a range back and joins it with its neighbours."""
        merged: list[tuple[int, int, int]] = []
        for slab, start, end in sorted([*self._free, range_]):
            if merged and merged[-1][0] == slab and merged[-1][2] == start:
                merged[-1] = (slab, merged[-1][1], end)
            else:
                merged.append((slab, start, end))
        self._free = merged
