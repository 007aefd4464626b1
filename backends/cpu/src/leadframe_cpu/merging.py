"""Joins recorded products of the same input into one call.

The projections of a layer that read one tensor come one after the other. As one call they share
the packing of their input and one meeting of the threads, and divide more evenly among them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from leadframe_cpu.library import Kernel

LINEAR_LAYOUT: Final = "9q"
"""The arguments of `lf_linear`, in the order of `LinearCall`."""


class LinearCall(NamedTuple):
    """The arguments of one product; see native/linear.cpp."""

    x: int
    y: int
    weight: int
    bias: int
    layout: int
    m: int
    n: int
    k: int
    is_bf16: int

    @property
    def end(self) -> int:
        """The first address after y."""
        return self.y + self.m * self.n * (2 if self.is_bf16 else 4)


class MergedCall(NamedTuple):
    """A call that may stand for several.

    Attributes:
      address: the function.
      packed: its arguments.
      keep: what the arguments point at.
    """

    address: int
    packed: bytes
    keep: object = None


def merge(calls: Sequence[tuple[Kernel, bytes]], linear: Kernel, group: Kernel) -> list[MergedCall]:
    """Replaces runs of `linear` on one input by calls of `group`; the rest stays as it is."""
    merged: list[MergedCall] = []
    run: list[bytes] = []

    def close() -> None:
        if len(run) == 1:
            merged.append(MergedCall(linear.address, run[0]))
        elif run:
            products = ctypes.create_string_buffer(b"".join(run))
            packed = group.pack(ctypes.addressof(products), len(run))
            merged.append(MergedCall(group.address, packed, products))
        run.clear()

    for kernel, packed in calls:
        if kernel is not linear or (run and not _may_join(run, packed)):
            close()
        if kernel is linear:
            run.append(packed)
        else:
            merged.append(MergedCall(kernel.address, packed))
    close()
    return merged


def _may_join(run: Sequence[bytes], packed: bytes) -> bool:
    """Whether a product reads what the run reads, and neither's result is the other's memory."""
    first, last = _unpack(run[0]), _unpack(packed)
    if (first.x, first.m, first.k, first.is_bf16) != (last.x, last.m, last.k, last.is_bf16):
        return False
    others = map(_unpack, run)
    return all(last.end <= other.y or other.end <= last.y for other in others)


def _unpack(packed: bytes) -> LinearCall:
    return LinearCall(*struct.unpack("=" + LINEAR_LAYOUT, packed))
