"""NumPy as a backend's array namespace."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as xnp
import numpy as np
import numpy.typing as npt

from leadframe.platform.namespace import ArrayNamespace

_Array = npt.NDArray[Any]


def _put(buf: _Array, rows: _Array, cols: _Array, values: _Array) -> _Array:
    buf[rows, cols] = values
    return buf


def _top_k(x: _Array, k: int) -> tuple[_Array, _Array]:
    """Partitions before it sorts; equal values come in index order, as in a stable sort."""
    if k < x.shape[-1]:
        found = np.sort(np.argpartition(-x, k - 1, axis=-1)[..., :k], axis=-1)
        values = np.take_along_axis(x, found, axis=-1)
        order = np.argsort(-values, axis=-1, kind="stable")
        indices = np.take_along_axis(found, order, axis=-1)
    else:
        indices = np.argsort(-x, axis=-1, kind="stable")
    return np.take_along_axis(x, indices, axis=-1), indices.astype(np.int32)


def numpy_namespace() -> ArrayNamespace:
    """Returns NumPy with `put` (in place) and `top_k`."""
    return ArrayNamespace(xnp, put=_put, top_k=_top_k)


__all__ = ["numpy_namespace"]
