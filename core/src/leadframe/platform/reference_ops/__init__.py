"""The definition of every op, written once over an array namespace.

They are correct on any library and fast on none. The kit's oracle is these same functions with
`f32=float64` on NumPy; a backend uses those that it does not implement itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from leadframe.platform.ops import OP_NAMES
from leadframe.platform.reference_ops import attention, kv, layers, sampling
from leadframe.platform.reference_ops.context import Context

_MODULES = (kv, attention, layers, sampling)


def _definition(name: str) -> Callable[..., Any]:
    for module in _MODULES:
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise LookupError(f"op {name!r} has no reference")


def reference_ops(xp: Any, f32: Any = None) -> dict[str, Callable[..., Any]]:
    """Binds the reference of every op to an array namespace.

    Args:
      xp: an array API namespace with `put` and `top_k` (see `ArrayNamespace`).
      f32: the dtype to accumulate in; None is `xp.float32`.

    Returns:
      One function per name in `OP_NAMES`. `kv_append`, `attention` and `kv_copy` work on a KV
      layer that is one array [num_blocks, block_size, 2 * kv_heads, head_dim].
    """
    context = Context(xp, xp.float32 if f32 is None else f32)
    return {name: partial(_definition(name), context) for name in OP_NAMES}


__all__ = ["reference_ops"]
