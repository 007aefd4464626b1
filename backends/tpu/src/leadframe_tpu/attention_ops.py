"""The attention ops of the contract, over the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe_tpu.kernels.append import append_rows
from leadframe_tpu.kernels.attention import Interpret, attend_tiles
from leadframe_tpu.kernels.layout import KVBlocks, lane_width
from leadframe_tpu.kernels.work import (
    Runs,
    Tiles,
    append_runs,
    attention_tiles,
    live_tokens,
    query_tile,
    row_groups,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work lists of a step, for layers with one set of `AttnParams`.

    Attributes:
      runs: where K and V go.
      tiles: who attends to what, for groups of rows whose block tables fit scalar memory.
      is_live: bool [T]; the others are padding.
      queries: most queries of a tile.
    """

    runs: Runs
    tiles: tuple[Tiles, ...]
    is_live: jax.Array
    queries: int = field(metadata={"static": True})


def plan(batch: StepArrays, params: AttnParams) -> AttentionPlan:
    """Makes the work lists of a batch."""
    bucket = batch.bucket
    groups = row_groups(bucket.num_seqs, bucket.num_blocks)
    return AttentionPlan(
        runs=append_runs(batch.slots),
        tiles=tuple(attention_tiles(batch, rows, params.window) for rows in groups),
        is_live=live_tokens(batch),
        queries=query_tile(bucket.num_tokens, bucket.num_decodes),
    )


def kv_append(
    kv_d: KVBlocks, k: jax.Array, v: jax.Array, plan: AttentionPlan, *, interpret: Interpret
) -> KVBlocks:
    """Writes K and V [T, K, D] to the slots of the batch, in place."""
    num_tokens, _, dim = k.shape
    rows = jnp.concatenate([k, v], axis=2).astype(kv_d.data.dtype)
    padding = lane_width(dim) - 2 * dim
    if padding:
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding)))
    rows = rows.reshape(num_tokens, -1)
    return kv_d.with_data(append_rows(kv_d.data, rows, plan.runs, interpret))


def attention(
    q: jax.Array,
    kv: KVBlocks,
    plan: AttentionPlan,
    params: AttnParams,
    *,
    interpret: Interpret,
) -> jax.Array:
    """Causal paged attention of q [T, H, D]; returns [T, H, D], zeros for padding."""
    out = attend_tiles(q, kv, plan.tiles, params, plan.queries, interpret)
    return jnp.where(plan.is_live[:, None, None], out, 0.0).astype(q.dtype)
