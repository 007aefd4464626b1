"""Reference paged attention: the padded form, called once for decodes and once for chunks.

One padded call over everything would give each decode as many query columns as the longest
chunk has tokens. Decode rows come first and their number is a bucket value, so the batch splits
without looking at data.
"""

from __future__ import annotations

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.reference_ops.context import Array, Context

_NO_WINDOW = 2**30
_MASKED = -1e30  # finite, so that a row that sees nothing has no inf - inf


def attention(c: Context, q: Array, kv: Array, plan: StepArrays, params: AttnParams) -> Array:
    """Causal attention of q [T, H, D] over the cache; returns [T, H, D]."""
    bucket, parts = plan.bucket, []
    if bucket.num_decodes:
        parts.append(_decodes(c, q, kv, plan, params))
    if bucket.num_tokens > bucket.num_decodes:
        parts.append(_chunks(c, q, kv, plan, params))
    return parts[0] if len(parts) == 1 else c.xp.concat(parts, axis=0)


def _decodes(c: Context, q: Array, kv: Array, plan: StepArrays, params: AttnParams) -> Array:
    """Rows [0, D), one token each; a padded row has seq_len 0 and sees nothing."""
    num = plan.bucket.num_decodes
    lens = plan.seq_lens[:num]
    out = _padded(c, q[:num, None, :, :], kv, plan.block_table[:num, :], lens, lens - 1, params)
    return out[:, 0, :, :]


def _chunks(c: Context, q: Array, kv: Array, plan: StepArrays, params: AttnParams) -> Array:
    """Rows [D, S): ragged tokens become a padded [rows, tokens] and come back."""
    xp, first = c.xp, plan.bucket.num_decodes
    num_tokens = plan.bucket.num_tokens - first
    num_rows = plan.bucket.num_seqs - first
    if num_rows == 0:  # only padding tokens, which belong to no row
        return xp.zeros_like(q[first:, :, :])
    starts = plan.query_start[first:-1] - first
    ends = plan.query_start[first + 1 :] - first
    tokens = c.iota(num_tokens)
    lens = plan.seq_lens[first:]
    to_padded = xp.clip(starts[:, None] + tokens[None, :], 0, num_tokens - 1)
    out = _padded(
        c,
        c.take(q[first:, :, :], to_padded),
        kv,
        plan.block_table[first:, :],
        lens,
        lens - (ends - starts),
        params,
    )
    row = xp.sum(xp.astype(tokens[:, None] >= ends[None, :], xp.int32), axis=1, dtype=xp.int32)
    is_live = row < num_rows
    row = xp.clip(row, 0, num_rows - 1)
    place = row * num_tokens + xp.clip(tokens - xp.take(starts, row, axis=0), 0, num_tokens - 1)
    out = c.take(xp.reshape(out, (num_rows * num_tokens, *out.shape[2:])), place)
    return xp.where(is_live[:, None, None], out, xp.zeros_like(out))


def _padded(
    c: Context,
    q: Array,
    kv: Array,
    block_table: Array,
    seq_lens: Array,
    first_pos: Array,
    params: AttnParams,
) -> Array:
    """Attention of a rectangle of queries.

    Args:
      c: the array library.
      q: [R, Q, H, D]; query column j of row r stands at position first_pos[r] + j.
      kv: the layer, [N, block_size, 2 * K, D].
      block_table: int32 [R, P].
      seq_lens: int32 [R], keys of each row.
      first_pos: int32 [R].
      params: constants of the layer.

    Returns:
      [R, Q, H, D] in q's dtype; zeros where a query sees no key.
    """
    xp = c.xp
    num_rows, num_q, num_heads, dim = q.shape
    window = params.window if params.window is not None else _NO_WINDOW
    keys = c.iota(block_table.shape[1] * kv.shape[1])
    oldest = first_pos - window
    is_read = (keys[None, :] < seq_lens[:, None]) & (keys[None, :] > oldest[:, None])
    k, v = _gather(c, kv, block_table, is_read)
    num_kv_heads = k.shape[1]
    grouped = xp.reshape(c.up(q), (num_rows, num_q, num_kv_heads, num_heads // num_kv_heads, dim))
    scores = xp.matmul(
        xp.permute_dims(grouped, (0, 2, 3, 1, 4)), xp.matrix_transpose(k)[:, :, None, :, :]
    )
    position = first_pos[:, None] + c.iota(num_q)[None, :]
    sees = is_read[:, None, :] & (keys[None, None, :] <= position[:, :, None])
    sees = sees & (keys[None, None, :] > position[:, :, None] - window)
    weights = _softmax(c, scores, sees[:, None, None, :, :], params)
    out = xp.permute_dims(xp.matmul(weights, v[:, :, None, :, :]), (0, 3, 1, 2, 4))
    return c.as_type(xp.reshape(out, (num_rows, num_q, num_heads, dim)), q)


def _gather(c: Context, kv: Array, block_table: Array, is_read: Array) -> tuple[Array, Array]:
    """Returns K and V [R, K, keys, D], with zeros in every slot that the row does not read.

    Masking scores is not enough: a weight of 0 times a NaN is a NaN.
    """
    xp = c.xp
    num_rows, num_keys = is_read.shape
    blocks = c.take(kv, block_table)
    blocks = xp.reshape(blocks, (num_rows, num_keys, 2, kv.shape[2] // 2, kv.shape[3]))
    blocks = xp.where(is_read[:, :, None, None, None], blocks, xp.zeros_like(blocks))
    both = xp.permute_dims(c.up(blocks), (2, 0, 3, 1, 4))
    return both[0, ...], both[1, ...]


def _softmax(c: Context, scores: Array, sees: Array, params: AttnParams) -> Array:
    """Softmax of scaled and capped scores over the keys that are seen; 0 where none is."""
    xp = c.xp
    scores = scores * params.scale
    if params.softcap is not None:
        scores = params.softcap * xp.tanh(scores / params.softcap)
    scores = xp.where(sees, scores, xp.full_like(scores, _MASKED))
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = xp.where(sees, weights, xp.zeros_like(weights))
    total = xp.sum(weights, axis=-1, keepdims=True)
    return weights / xp.where(total > 0, total, xp.ones_like(total))
