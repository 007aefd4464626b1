"""Weights that are read when they are asked for, from safetensors and GGUF files alike.

Every file is mapped, never read whole: a slice of a weight touches the pages that it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from leadframe.platform.backend import WeightSource

Index = tuple[slice, ...]


class StoredWeight(WeightSource, Protocol):
    """A weight source that knows how large it is in its file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""


NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class MappedFile:
    """A file mapped into memory, of which ranges of bytes are viewed.

    Attributes:
      path: the file.
      num_bytes: its length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, np.uint8, mode="r")
        self.num_bytes = self._bytes.size

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns bytes [offset, offset + num_bytes) without reading them yet."""
        return self._bytes[offset : offset + num_bytes].view(np.ndarray)


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight whose elements are stored as they are.

    Attributes:
      file: where it is.
      offset: its first byte.
      shape: its shape.
      dtype: its element type, a key of `NUMPY_DTYPES`.
    """

    file: MappedFile
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    def rows(self, start: int, stop: int) -> PlainWeight:
        """Returns rows [start, stop) as a weight of their own."""
        row_bytes = self.num_bytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return PlainWeight(self.file, self.offset + start * row_bytes, shape, self.dtype)

    def read(self, index: Index | None = None) -> npt.NDArray[Any]:
        """Returns a read-only view of the rows that a slice spans; the caller's copy reads it."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not self.shape:
            return self.file.view(self.offset, dtype.itemsize).view(dtype).reshape(())
        rows, *rest = whole_index(self.shape, index)
        row_bytes = prod(self.shape[1:]) * dtype.itemsize
        span = max(0, rows.stop - rows.start)
        raw = self.file.view(self.offset + rows.start * row_bytes, span * row_bytes)
        whole = raw.view(dtype).reshape(span, *self.shape[1:])
        return whole[
            (slice(None, None, rows.step), *(slice(r.start, r.stop, r.step) for r in rest))
        ]


def whole_index(shape: Sequence[int], index: Index | None) -> tuple[range, ...]:
    """Turns an optional tuple of slices, of positive steps, into one range for every axis."""
    slices = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
    return tuple(range(*s.indices(n)) for s, n in zip(slices, shape, strict=True))
