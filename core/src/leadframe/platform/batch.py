"""One batch type for prefill, chunked prefill, decode and any mix.

Shapes: T tokens, S sequences (rows), P blocks per block table, L rows of logits, A logit edits
per row, W words of token mask. All are bucket values: a step function never sees a live count.

Rows [0, D) are the decode rows, D = `Bucket.num_decodes`: row i owns exactly token i. Rows
[D, S) own the chunk tokens [D, T) through `query_start`. A row with `seq_lens == 0` is padding:
its output is finite and ignored. A padded decode row still owns its token; a padded chunk row
repeats `query_start`. Padded tokens have slot 0: block 0 is the null block, written by padding
and never part of a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

SampleVariant = Literal["skip", "greedy", "plain", "threshold", "sort"]
"""How the step turns logits into tokens.

"skip": no row samples, the head is not computed. "greedy": argmax. "plain": temperature and
min_p. "threshold": top_k and top_p from the 1,024 best candidates. "sort": the same from a full
sort, for rows that the candidates do not cover.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The static sizes of a compiled step; also its cache key.

    Attributes:
      num_tokens: T.
      num_seqs: S.
      num_decodes: D, the leading rows with one token each.
      num_blocks: P, the width of the block table.
      num_logits: L: S rows that may sample, then rows that are only scored (prompt logprobs).
        0 when `sample` is "skip".
      sample: how tokens are chosen.
      num_edits: A, logit edits per sampling row; 0 for none.
      num_logprobs: top log-probabilities returned per logits row; None for none, 0 for only
        the target's.
      num_mask_words: W = ceil(V / 32) where a row of the step masks tokens; 0 where none does.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    num_blocks: int
    num_logits: int
    sample: SampleVariant = "greedy"
    num_edits: int = 0
    num_logprobs: int | None = None
    num_mask_words: int = 0


def forward_bucket(bucket: Bucket) -> Bucket:
    """Returns a bucket's sizes without what only its logits and sampling ask for.

    Its packed ints are the first of the bucket's, and it has no floats.
    """
    return Bucket(
        bucket.num_tokens, bucket.num_seqs, bucket.num_decodes, bucket.num_blocks, 0, "skip"
    )


def head_bucket(bucket: Bucket) -> Bucket:
    """Returns a bucket's sizes without what only its layers ask for; those are 0.

    Buckets in which it is the same may share a head.
    """
    return replace(bucket, num_tokens=0, num_decodes=0, num_blocks=0)


_Field = tuple[str, tuple[int, ...]]


@lru_cache(maxsize=4096)
def int_fields(bucket: Bucket) -> tuple[_Field, ...]:
    """Returns (name, shape) of the int32 arrays of a bucket, in packed order."""
    b = bucket
    fields: list[_Field] = [
        ("query_start", (b.num_seqs + 1,)),
        ("seq_lens", (b.num_seqs,)),
        ("block_table", (b.num_seqs, b.num_blocks)),
        ("slots", (b.num_tokens,)),
        ("positions", (b.num_tokens,)),
        ("token_ids", (b.num_tokens,)),
        ("logits_idx", (b.num_logits,)),
    ]
    if b.num_logprobs is not None:
        fields.append(("targets", (b.num_logits,)))
    if b.sample in ("threshold", "sort"):
        fields.append(("top_k", (b.num_seqs,)))
    if b.num_edits:
        fields += [("edit_ids", (b.num_seqs, b.num_edits)), ("keep_only", (b.num_seqs,))]
    if b.num_mask_words:
        fields.append(("token_mask", (b.num_seqs, b.num_mask_words)))
    return tuple(fields)


@lru_cache(maxsize=4096)
def float_fields(bucket: Bucket) -> tuple[_Field, ...]:
    """Returns (name, shape) of the float32 arrays of a bucket, in packed order."""
    b = bucket
    fields: list[_Field] = []
    if b.sample in ("plain", "threshold", "sort"):
        names = ("temperature", "uniform", "min_p") + (() if b.sample == "plain" else ("top_p",))
        fields += [(name, (b.num_seqs,)) for name in names]
    if b.num_edits:
        fields += [(name, (b.num_seqs, b.num_edits)) for name in ("edit_scale", "edit_add")]
    return tuple(fields)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The arrays of one step, on the device, in the backend's own type.

    Attributes:
      bucket: the static sizes.
      query_start: int32 [S + 1], first token of each row.
      seq_lens: int32 [S], tokens visible to attention after this step; 0 is padding.
      block_table: int32 [S, P], block ids in token order; unused entries are 0.
      slots: int32 [T], where each token's K/V goes: block_id * block_size + offset.
      positions: int32 [T], position of each token in its sequence.
      token_ids: int32 [T].
      logits_idx: int32 [L], the tokens whose logits are computed; the first S belong to the
        rows in order.
      targets: int32 [L], the token whose log-probability is reported for each logits row; the
        first S entries are ignored, their target is the sampled token.
      temperature: float32 [S]; 0 takes the argmax.
      uniform: float32 [S] in [0, 1), multiples of 2**-24.
      min_p: float32 [S]; 0 is off.
      top_k: int32 [S]; 0 is off.
      top_p: float32 [S]; 1 is off.
      edit_ids: int32 [S, A], tokens whose logits are edited; padding repeats an id with the
        same edit, or is id 0 with scale 1 and add 0.
      edit_scale: float32 [S, A]: positive logits are divided by it, others multiplied.
      edit_add: float32 [S, A], added after scaling.
      keep_only: int32 [S]; 1 sets every token that is not in `edit_ids` to -inf.
      token_mask: int32 [S, W], applied after the edits; where bit t % 32 of word t // 32 is set,
        token t becomes -inf. Zeros, which padding has, mask nothing.
    """

    bucket: Bucket
    query_start: Any
    seq_lens: Any
    block_table: Any
    slots: Any
    positions: Any
    token_ids: Any
    logits_idx: Any
    targets: Any = None
    temperature: Any = None
    uniform: Any = None
    min_p: Any = None
    top_k: Any = None
    top_p: Any = None
    edit_ids: Any = None
    edit_scale: Any = None
    edit_add: Any = None
    keep_only: Any = None
    token_mask: Any = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's inputs on the host: two packed buffers, and live counts for whoever wants them.

    Attributes:
      bucket: the static sizes.
      ints: int32, every array of `int_fields` one after the other.
      floats: float32, every array of `float_fields`; empty for greedy steps.
      live_tokens: tokens that are not padding.
      live_seqs: rows that are not padding.
      max_seq_len: the longest `seq_lens`.
    """

    bucket: Bucket
    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]
    live_tokens: int
    live_seqs: int
    max_seq_len: int


def _split(packed: Any, fields: tuple[_Field, ...]) -> dict[str, Any]:
    out, start = {}, 0
    for name, shape in fields:
        size = prod(shape)
        part = packed[start : start + size]
        out[name] = part if len(shape) == 1 else part.reshape(shape)
        start += size
    return out


def packed_sizes(bucket: Bucket) -> tuple[int, int]:
    """Returns how many int32 and how many float32 elements a bucket's buffers hold."""
    return (
        sum(prod(shape) for _, shape in int_fields(bucket)),
        sum(prod(shape) for _, shape in float_fields(bucket)),
    )


def unpack(bucket: Bucket, ints: Any, floats: Any) -> StepArrays:
    """Slices the two packed device buffers into named arrays.

    Works on any array type with slicing and `.reshape`; inside a traced function too.

    Args:
      bucket: the sizes that the buffers were packed with.
      ints: int32 [n], a device array.
      floats: float32 [m], a device array; ignored when the bucket has no float fields.
    """
    arrays = _split(ints, int_fields(bucket))
    arrays.update(_split(floats, float_fields(bucket)))
    return StepArrays(bucket=bucket, **arrays)


def forward_arrays(arrays: StepArrays) -> StepArrays:
    """Returns the arrays that `forward_bucket` has, out of a step's."""
    names = [name for name, _ in int_fields(forward_bucket(arrays.bucket))]
    kept = {name: getattr(arrays, name) for name in names}
    kept["logits_idx"] = arrays.logits_idx[:0]
    return StepArrays(forward_bucket(arrays.bucket), **kept)


def head_arrays(bucket: Bucket, ints: Any, floats: Any) -> StepArrays:
    """Slices what a head reads; the arrays that only layers read are None.

    Args:
      bucket: the sizes of the step; the arrays have those of `head_bucket`.
      ints: int32 [n], the packed ints behind those of `forward_bucket`; a device array.
      floats: float32 [m], as in `unpack`.
    """
    fields = int_fields(bucket)
    first = [name for name, _ in fields].index("logits_idx")
    arrays: dict[str, Any] = dict.fromkeys(name for name, _ in fields[:first])
    arrays.update(_split(ints, fields[first:]))
    arrays.update(_split(floats, float_fields(bucket)))
    return StepArrays(head_bucket(bucket), **arrays)
