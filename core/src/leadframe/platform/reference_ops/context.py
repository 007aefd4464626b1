"""What every reference op is written over: an array namespace and an accumulation type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any


@dataclass(frozen=True, slots=True)
class Context:
    """The array library that the references run on.

    Attributes:
      xp: an array API namespace with `put` and `top_k`.
      f32: the dtype that ops accumulate in: float32, or float64 in the kit's oracle.
    """

    xp: Any
    f32: Any

    def up(self, x: Array) -> Array:
        """Casts to the accumulation type, or leaves float64, which is wider."""
        return x if x.dtype == self.xp.float64 else self.xp.astype(x, self.f32, copy=False)

    def as_type(self, x: Array, like: Array) -> Array:
        """Casts to the type of another array."""
        return self.xp.astype(x, like.dtype, copy=False)

    def iota(self, n: int) -> Array:
        """int32 [0, n)."""
        return self.xp.arange(n, dtype=self.xp.int32)

    def take(self, x: Array, indices: Array) -> Array:
        """Rows of x at indices of any shape; no index may be out of range.

        Flattens the indices, because libraries disagree about indices with several axes.
        """
        flat = self.xp.take(x, self.xp.reshape(indices, (-1,)), axis=0)
        return self.xp.reshape(flat, (*indices.shape, *x.shape[1:]))
