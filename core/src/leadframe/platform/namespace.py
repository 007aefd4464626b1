"""The array namespace of a backend: the array API standard plus two primitives outside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PRIMITIVES = ("put", "top_k")
"""What the standard lacks and the reference ops need."""


class ArrayNamespace:
    """An array API namespace with `put` and `top_k` added.

    Its creation functions must create on the backend's device. Everything else is looked up in
    `base` once and then is a plain attribute.

    Attributes:
      put: `put(buf, rows, cols, values)` returns buf with buf[rows[i], cols[i]] = values[i]; it
        may write in place. Where a (row, col) pair repeats, any of its values may win.
      top_k: `top_k(x, k)` returns (values, int32 indices) of the k largest entries of the last
        axis, largest first.
    """

    def __init__(
        self, base: Any, *, put: Callable[..., Any], top_k: Callable[..., tuple[Any, Any]]
    ) -> None:
        self._base = base
        self.put = put
        self.top_k = top_k

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._base, name)
        setattr(self, name, value)
        return value


__all__ = ["PRIMITIVES", "ArrayNamespace"]
