"""Which part of a weight a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.errors import Unsupported
from leadframe.platform.backend import Partition, WeightSource
from leadframe.platform.info import Limits


@dataclass(frozen=True, slots=True)
class Rank:
    """A place in a tensor-parallel group.

    Attributes:
      index: which one.
      count: how many there are.
      rendezvous: a private directory, the same for all of them; empty for one rank.
    """

    index: int = 0
    count: int = 1
    rendezvous: str = ""

    @staticmethod
    def of(limits: Limits) -> Rank:
        """The rank that the core asks a backend to be."""
        return Rank(limits.rank, limits.tensor_parallel_size, limits.rendezvous)


def read_part(
    source: npt.NDArray[Any] | WeightSource, partition: Partition | None, rank: Rank
) -> npt.NDArray[Any]:
    """Reads what `rank` holds of a source, and no more.

    Raises:
      Unsupported: the axis does not divide by the number of ranks.
    """
    index = part_index(tuple(source.shape), partition, rank)
    if isinstance(source, np.ndarray):
        return source if index is None else source[index]
    return source.read(index)


def part_index(
    shape: tuple[int, ...], partition: Partition | None, rank: Rank
) -> tuple[slice, ...] | None:
    """Returns the slices of `rank`'s part; None means everything."""
    if rank.count == 1 or partition is None or partition.axis is None:
        return None
    axis = partition.axis
    count, unit = shape[axis], 1
    if partition.heads is not None:
        count, unit = partition.heads, partition.unit
    if partition.heads is not None and count < rank.count and rank.count % count == 0:
        first, size = rank.index // (rank.count // count), 1  # several ranks hold the same head
    elif count % rank.count == 0:
        size = count // rank.count
        first = rank.index * size
    else:
        raise Unsupported(
            "upload",
            partition,
            f"axis {axis} of a weight of shape {shape} has {count} parts, which do not divide "
            f"among {rank.count} ranks; choose another --tensor-parallel-size",
        )
    cut = slice(first * unit, (first + size) * unit)
    return tuple(cut if a == axis else slice(None) for a in range(len(shape)))
