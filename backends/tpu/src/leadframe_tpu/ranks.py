"""The chips that share one model, and which part of an array each holds.

One process drives all of them through a mesh with a single axis. Weights and KV are global arrays
with a sharding; a compiled step sees one rank's share of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from leadframe.errors import Unsupported
from leadframe.platform.backend import Partition, WeightRole, WeightSource
from leadframe_tpu.layer_ops import AXIS

KV_SPEC = PartitionSpec(None, None, AXIS)
"""KV heads lie along the last axis of a layer's blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis of a weight is shared.

    Attributes:
      axis: the axis.
      unit: elements that stay together.
      repeat: ranks that hold the same unit; the global array has each unit this many times.
    """

    axis: int
    unit: int
    repeat: int

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the global array, repetitions included."""
        return tuple(n * self.repeat if a == self.axis else n for a, n in enumerate(shape))

    def source_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Translates an index into the global array to one into the source."""
        wanted = index[self.axis]
        first, stop = wanted.start // self.unit, -(-wanted.stop // self.unit)
        first, stop = first // self.repeat, -(-stop // self.repeat)
        part = slice(first * self.unit, stop * self.unit)
        return tuple(part if a == self.axis else s for a, s in enumerate(index))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a weight lie.

    Attributes:
      shape: of the global array.
      where: its sharding, with a layout where that must not be left to XLA.
      cut: how it is shared; None if every rank holds all of it.
    """

    shape: tuple[int, ...]
    where: NamedSharding | Format
    cut: Cut | None


class Ranks:
    """A group of devices.

    Args:
      devices: one a rank.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.kv_sharding = NamedSharding(self.mesh, KV_SPEC)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.devices)

    def cut(self, shape: tuple[int, ...], partition: Partition | None) -> Cut | None:
        """Returns how a weight is shared; None means that every rank holds all of it.

        Raises:
          Unsupported: it does not divide among the ranks.
        """
        if self.count == 1 or partition is None or partition.axis is None:
            return None
        axis, heads = partition.axis, partition.heads
        if heads is None:
            parts, unit = shape[axis], 1
        else:
            parts, unit = heads, partition.unit
        if parts % self.count == 0:
            return Cut(axis, unit, 1)
        if heads is not None and self.count % parts == 0:
            return Cut(axis, unit, self.count // parts)
        raise Unsupported(
            "upload",
            partition,
            f"axis {axis} of a weight of shape {shape} has {parts} parts, which do not divide "
            f"among {self.count} chips; choose another --tensor-parallel-size",
        )

    def placement(
        self, shape: tuple[int, ...], partition: Partition | None, role: WeightRole = "tensor"
    ) -> Placement:
        """Returns where the parts of a weight lie.

        A table that rows are taken from is kept row by row. Left alone, XLA stores it by columns
        where that wastes fewer lanes, and copies all of it in every step.
        """
        cut = self.cut(shape, partition)
        sharding, whole = self.replicated, shape
        if cut is not None:
            axes = [AXIS if axis == cut.axis else None for axis in range(len(shape))]
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            whole = cut.global_shape(shape)
        if role != "embed":
            return Placement(whole, sharding, cut)
        by_rows = Format(Layout(tuple(range(len(shape)))), sharding)
        return Placement(whole, by_rows, cut)

    def kv_heads(self, num_kv_heads: int) -> int:
        """Returns how many KV heads the global array of a layer holds, repetitions included.

        Raises:
          Unsupported: they do not divide among the ranks.
        """
        if num_kv_heads % self.count == 0 or self.count % num_kv_heads == 0:
            return max(num_kv_heads, self.count)
        raise Unsupported(
            "kv_alloc",
            num_kv_heads,
            f"{num_kv_heads} KV heads do not divide among {self.count} chips; "
            "choose another --tensor-parallel-size",
        )

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: np.dtype[Any],
        partition: Partition | None,
        role: WeightRole = "tensor",
    ) -> jax.Array:
        """Copies a weight to the ranks, reading each rank's slice by itself."""
        place = self.placement(tuple(source.shape), partition, role)

        def part(index: tuple[slice, ...] | None) -> npt.NDArray[Any]:
            assert index is not None, "the shape is known"
            bounds = [s.indices(n) for s, n in zip(index, place.shape, strict=True)]
            exact = tuple(slice(start, stop) for start, stop, _ in bounds)
            if place.cut is not None:
                exact = place.cut.source_index(exact)
            return _read(source, exact, dtype)

        return jax.make_array_from_callback(place.shape, place.where, part, dtype=dtype)


def _read(
    source: npt.NDArray[Any] | WeightSource, index: tuple[slice, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Reads a slice into memory of its own: JAX may keep what it is given."""
    host = source[index] if isinstance(source, np.ndarray) else source.read(index)
    return np.array(host, dtype=dtype, order="C", copy=True)
