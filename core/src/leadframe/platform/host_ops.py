"""Reference ops on the host, for a device whose array library cannot run one: slow, and opt-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from leadframe.platform.backend import Backend
from leadframe.platform.reference.namespace import numpy_namespace
from leadframe.platform.reference_ops import reference_ops


def host_op(op: str, backend: Backend) -> Callable[..., Any]:
    """Returns an op that downloads its arrays, computes in NumPy and uploads its results.

    It synchronises on every call and cannot be part of a captured graph. It suits ops whose
    arrays are all arguments; the KV cache never leaves the device.

    Args:
      op: a name from `OP_NAMES` other than those that touch the KV cache.
      backend: whose arrays it takes and returns.
    """
    function = reference_ops(numpy_namespace())[op]

    def down(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(down(part) for part in value)
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        return backend.download(value) if is_array else value

    def up(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(up(part) for part in value)
        return backend.upload(value) if isinstance(value, np.ndarray) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: down(value) for name, value in kwargs.items()}
        return up(function(*(down(value) for value in args), **given))

    return run


__all__ = ["host_op"]
