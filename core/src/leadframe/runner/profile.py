"""A batch that is as large as its bucket allows, to measure what the largest step costs."""

from __future__ import annotations

import numpy as np

from leadframe.platform.batch import Bucket, StepBatch, packed_sizes, unpack


def full_batch(bucket: Bucket, block_size: int) -> StepBatch:
    """Returns a batch in which every row and token of a bucket is live.

    All blocks are the null block and every token is token 0: what is computed means nothing,
    and takes the time and memory of a real step.

    Args:
      bucket: the sizes.
      block_size: tokens per block, which bounds the length of a row.
    """
    num_ints, num_floats = packed_sizes(bucket)
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    arrays = unpack(bucket, ints, floats)
    lengths = _query_lengths(bucket)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays.query_start[:] = starts
    arrays.seq_lens[:] = np.minimum(np.maximum(lengths, 1), bucket.num_blocks * block_size)
    arrays.seq_lens[: bucket.num_decodes] = bucket.num_blocks * block_size
    for row in range(bucket.num_seqs):
        end = arrays.seq_lens[row]
        span = slice(starts[row], starts[row + 1])
        arrays.positions[span] = np.maximum(np.arange(end - lengths[row], end), 0)
    last = np.maximum(starts[1:] - 1, 0)
    arrays.logits_idx[: bucket.num_seqs] = last[: len(arrays.logits_idx)]
    if arrays.temperature is not None:
        arrays.temperature[:] = 1.0
        arrays.uniform[:] = 0.5
    if arrays.top_p is not None:
        arrays.top_p[:] = 1.0
    if arrays.edit_scale is not None:
        arrays.edit_scale[:] = 1.0
    longest = int(arrays.seq_lens.max())
    return StepBatch(bucket, ints, floats, bucket.num_tokens, bucket.num_seqs, longest)


def _query_lengths(bucket: Bucket) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Decode rows have one token; chunk rows share the rest evenly."""
    lengths = np.ones(bucket.num_seqs, np.int64)
    chunks = bucket.num_seqs - bucket.num_decodes
    if chunks:
        tokens = bucket.num_tokens - bucket.num_decodes
        share, rest = divmod(tokens, chunks)
        lengths[bucket.num_decodes :] = share
        lengths[bucket.num_decodes : bucket.num_decodes + rest] += 1
    return lengths
