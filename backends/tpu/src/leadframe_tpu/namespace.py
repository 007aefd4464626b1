"""The array namespace of the backend: `jax.numpy` with `put` and `top_k`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from leadframe.platform.namespace import ArrayNamespace

_MOST_SELECTED = 256
"""As many as XLA selects on a TPU; for more it sorts whole rows, pairs of value and index."""

_CREATION = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")


def jax_namespace(sharding: jax.sharding.Sharding | None = None) -> ArrayNamespace:
    """Returns `jax.numpy` with the two primitives.

    Args:
      sharding: where created arrays live; None leaves it to JAX, for use inside a trace.
    """
    base: Any = jnp
    if sharding is not None:
        base = _Overlay(
            **{name: partial(getattr(jnp, name), device=sharding) for name in _CREATION}
        )
    return ArrayNamespace(base, put=_put, top_k=_top_k)


class _Overlay(SimpleNamespace):
    """Attributes given to the constructor first, then those of `jax.numpy`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


def _put(buf: jax.Array, rows: jax.Array, cols: jax.Array, values: jax.Array) -> jax.Array:
    return buf.at[rows, cols].set(values)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    if k > _MOST_SELECTED:  # whoever takes only the values is spared moving indices along
        values = lax.rev(lax.sort(x, is_stable=False)[..., -k:], (x.ndim - 1,))
    return values, indices.astype(jnp.int32)
