"""Work lists: what the kernels walk, computed from a batch inside the step.

Attention walks *tiles*, each a few neighbouring queries of one row. A decode is a tile of one
query; a chunk is cut into tiles of up to `QUERY_TILE`. Writing K and V walks *runs*, each the
tokens of a batch that lie next to each other within one row tile of the cache. All sizes follow
from the bucket; how many entries are live does not, so the lists end in empty entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from leadframe.platform.batch import StepArrays
from leadframe_tpu.kernels.layout import ROW_TILE

QUERY_TILE = 32
"""Most queries that share one pass over the keys."""

TOKEN_TILE = 128
"""Tokens whose K and V are staged together."""

PIPELINE_DEPTH = 8
"""Runs that may be in flight at once; a run that rewrites a recent one's rows has to wait."""

MAX_TABLE_INTS = 160_000
"""Block table entries of one kernel call. Scalar memory holds 262,144 numbers in all."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries to attend, W tiles over R rows.

    A tile with `first_key == end_key` is empty, and nothing is written for it.

    Attributes:
      block_table: int32 [R * P], flat, because scalar memory pads a second axis to 128.
      next_live: int32 [W + 1]; entry i is the first tile from i on that is not empty, or W.
      table_start: int32 [W], where the tile's row starts in `block_table`.
      first_key: int32 [W], the first key that any query of the tile sees.
      end_key: int32 [W], one past the last.
      position: int32 [W], the position of the tile's first query.
      first_token: int32 [W], the batch's token of the tile's first query.
      num_queries: int32 [W].
      num_blocks: P.
    """

    block_table: jax.Array
    next_live: jax.Array
    table_start: jax.Array
    first_key: jax.Array
    end_key: jax.Array
    position: jax.Array
    first_token: jax.Array
    num_queries: jax.Array
    num_blocks: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Runs:
    """Where the K and V of T tokens go, at most T runs.

    Attributes:
      bounds: int32 [T / TOKEN_TILE + 1], the first run of each token tile.
      token: int32 [T], the first token of each run.
      slot: int32 [T], its slot.
      length: int32 [T], tokens in the run.
      must_wait: int32 [T], 1 if one of the `PIPELINE_DEPTH - 1` runs before it has the same rows.
    """

    bounds: jax.Array
    token: jax.Array
    slot: jax.Array
    length: jax.Array
    must_wait: jax.Array


def row_groups(num_rows: int, num_blocks: int) -> list[tuple[int, int]]:
    """Cuts rows [0, num_rows) so that the block table of each group fits scalar memory."""
    size = max(1, MAX_TABLE_INTS // num_blocks)
    return [(row, min(row + size, num_rows)) for row in range(0, num_rows, size)]


def query_tile(num_tokens: int, num_decodes: int) -> int:
    """Returns the most queries of a tile of a batch: a power of two."""
    if num_tokens == num_decodes:
        return 1
    queries = QUERY_TILE
    while queries // 2 >= max(ROW_TILE, num_tokens):
        queries //= 2
    return queries


def attention_tiles(batch: StepArrays, rows: tuple[int, int], window: int | None) -> Tiles:
    """Cuts the tokens of rows [start, stop) into tiles.

    Args:
      batch: the step's arrays.
      rows: [start, stop); a row may have any number of tokens. Those of padded rows, with
        seq_len 0, end before key 0: their tiles are empty.
      window: of `AttnParams`.
    """
    start, stop = rows
    bucket = batch.bucket
    queries = query_tile(bucket.num_tokens, bucket.num_decodes)
    seq_lens, begins = batch.seq_lens[start:stop], batch.query_start[start:stop]
    counts = batch.query_start[start + 1 : stop + 1] - begins
    # A decode has one tile, however many tokens belong to rows of other groups.
    num_tokens = stop - start if queries == 1 else bucket.num_tokens
    num_tiles = _max_tiles(num_tokens, stop - start, queries)
    row, order = _spread(-(-counts // queries), num_tiles)
    offset = order * queries
    live = jnp.clip(counts[row] - offset, 0, queries)
    position = seq_lens[row] - counts[row] + offset
    end_key = jnp.where(live > 0, position + live, 0)
    first_key = jnp.zeros_like(position)
    if window is not None:
        first_key = jnp.clip(position - window + 1, 0, end_key)
    return Tiles(
        block_table=batch.block_table[start:stop].reshape(-1),
        next_live=_next_live(first_key < end_key),
        table_start=row * bucket.num_blocks,
        first_key=first_key,
        end_key=end_key,
        position=position,
        first_token=begins[row] + offset,
        num_queries=live,
        num_blocks=bucket.num_blocks,
    )


def live_tokens(batch: StepArrays) -> jax.Array:
    """Bool [T]: whether a token belongs to a row that is not padding."""
    token = jnp.arange(batch.bucket.num_tokens, dtype=jnp.int32)[:, None]
    starts, ends = batch.query_start[None, :-1], batch.query_start[None, 1:]
    return jnp.any((token >= starts) & (token < ends) & (batch.seq_lens[None] > 0), axis=1)


def _max_tiles(num_tokens: int, num_rows: int, queries: int) -> int:
    """The most tiles that rows can need: each may end in one that is not full."""
    if num_tokens <= num_rows:
        return num_tokens
    return num_rows + (num_tokens - num_rows) // queries


def _spread(per_row: jax.Array, num_tiles: int) -> tuple[jax.Array, jax.Array]:
    """Lists (row, which tile of that row) int32 [num_tiles] for `per_row` tiles a row.

    Entries past the last tile count on within the last row.
    """
    ends = jnp.cumsum(per_row)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)
    return row, tile - (ends - per_row)[row]


def _next_live(is_live: jax.Array) -> jax.Array:
    count = is_live.shape[0]
    tile = jnp.arange(count, dtype=jnp.int32)
    following = lax.cummin(jnp.where(is_live, tile, count), reverse=True)
    return jnp.concatenate([following, jnp.full((1,), count, jnp.int32)])


def append_runs(slots: jax.Array) -> Runs:
    """Groups tokens by where they go. Tokens with slot 0 are padding and go nowhere.

    Args:
      slots: int32 [T].
    """
    count = slots.shape[0]
    token = jnp.arange(count, dtype=jnp.int32)
    follows = jnp.concatenate([jnp.zeros((1,), bool), slots[1:] == slots[:-1] + 1])
    is_dead = slots == 0
    breaks = ~follows | is_dead | (slots % ROW_TILE == 0) | (token % TOKEN_TILE == 0)
    is_start = breaks & ~is_dead
    next_break = lax.cummin(jnp.where(breaks, token, count), reverse=True)
    next_break = jnp.concatenate([next_break[1:], jnp.full((1,), count, jnp.int32)])
    starts = jnp.minimum(jnp.sort(jnp.where(is_start, token, count)), count - 1)
    before = jnp.cumsum(is_start.astype(jnp.int32))
    tile_ends = jnp.arange(TOKEN_TILE, count + TOKEN_TILE, TOKEN_TILE, dtype=jnp.int32)
    bounds = before[jnp.minimum(tile_ends, count) - 1]
    slot = slots[starts]
    return Runs(
        bounds=jnp.concatenate([jnp.zeros((1,), jnp.int32), bounds]),
        token=starts,
        slot=slot,
        length=next_break[starts] - starts,
        must_wait=_must_wait(slot // ROW_TILE),
    )


def _must_wait(place: jax.Array) -> jax.Array:
    index = jnp.arange(place.shape[0], dtype=jnp.int32)
    clash = jnp.zeros(place.shape, bool)
    for back in range(1, PIPELINE_DEPTH):
        clash |= (index >= back) & (place == jnp.roll(place, back))
    return clash.astype(jnp.int32)
