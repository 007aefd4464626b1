"""Weights that are read when they are asked for, from safetensors and GGUF files alike.

Every file is mapped, never read whole: a slice of a weight touches the pages that it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        return int(np.prod(self.shape, dtype=np.int64)) * NUMPY_DTYPES[self.dtype].itemsize

    def read(self, index: Index | None = None) -> npt.NDArray[Any]:
        """Returns a read-only view of the file; nothing is copied until someone does."""
        raw = self.file.view(self.offset, self.num_bytes)
        whole = raw.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        return whole if index is None else whole[index]


def whole_index(shape: Sequence[int], index: Index | None) -> tuple[range, ...]:
    """Turns an optional tuple of slices into one range of step 1 for every axis."""
    slices = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
    return tuple(range(*s.indices(n)) for s, n in zip(slices, shape, strict=True))
