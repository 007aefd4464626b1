"""Ops between the embedding and the logits that gain from being written for XLA.

The others are the contract's own definitions, traced over `jax.numpy`: XLA fuses those, and a
second copy could only disagree. Under tensor parallelism these run inside `shard_map`, on one
rank's share of the weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "ranks"
"""The mesh axis that tensor parallelism splits."""


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """X [T, in] times weight [out, in] transposed, plus bias [out].

    Operands keep their type, so that bfloat16 goes to the matrix unit as it is; sums are float32.
    """
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    out = lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def embed(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of table [V, E] at int32 [T]; ids outside are clamped."""
    return table[jnp.clip(token_ids, 0, table.shape[0] - 1)]


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of x [T, E] at int32 [N]."""
    return x[rows]


def all_reduce(x: jax.Array) -> jax.Array:
    """The identity: one rank."""
    return x


def all_gather(x: jax.Array) -> jax.Array:
    """The identity: one rank."""
    return x


def embed_share(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of a table whose vocabulary the ranks share; every rank gets all of them."""
    share = table.shape[0]
    ids = jnp.clip(token_ids, 0, share * lax.axis_size(AXIS) - 1)
    local = ids - lax.axis_index(AXIS) * share
    is_mine = (local >= 0) & (local < share)
    rows = table[jnp.clip(local, 0, share - 1)]
    return sum_ranks(jnp.where(is_mine[:, None], rows, jnp.zeros_like(rows)))


def sum_ranks(x: jax.Array) -> jax.Array:
    """Sum of x over the ranks."""
    total: jax.Array = lax.psum(x, AXIS)
    return total


def join_ranks(x: jax.Array) -> jax.Array:
    """Concatenation of x over the ranks along the last axis."""
    whole: jax.Array = lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)
    return whole
