"""Builds step batches from a description of their rows, without the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform import Bucket, StepBatch, float_fields, int_fields


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a step.

    Attributes:
      num_tokens: tokens scheduled in this step, at least 1.
      seq_len: tokens visible to attention after it.
      blocks: block ids in token order; they cover `seq_len`.
    """

    num_tokens: int
    seq_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """How much larger the bucket is than what it holds."""

    decodes: int = 0
    rows: int = 0
    tokens: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Everything that makes a batch.

    Attributes:
      rows: decode rows (one token) first, then chunk rows.
      block_size: tokens per block.
      num_decodes: how many leading rows are decode rows.
      padding: what the bucket adds.
      extra: values of further fields, such as "token_ids" (live entries only).
      bucket: fields of the bucket that say what is sampled.
    """

    rows: tuple[Row, ...]
    block_size: int
    num_decodes: int
    padding: Padding = field(default_factory=Padding)
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    bucket: Mapping[str, Any] = field(default_factory=dict)


def bucket_of(spec: BatchSpec) -> Bucket:
    """Returns the bucket: live sizes plus padding."""
    pad, rows = spec.padding, spec.rows
    sizes = Bucket(
        num_tokens=sum(row.num_tokens for row in rows) + pad.decodes + pad.tokens,
        num_seqs=len(rows) + pad.decodes + pad.rows,
        num_decodes=spec.num_decodes + pad.decodes,
        num_blocks=max(len(row.blocks) for row in rows) + pad.blocks,
        num_logits=0,
        sample="skip",
    )
    return replace(sizes, **spec.bucket)


def make_batch(spec: BatchSpec) -> StepBatch:
    """Packs the arrays of a batch.

    Padding follows the contract: padded rows have seq_len 0, padded tokens slot 0, padded chunk
    rows repeat `query_start`.
    """
    bucket = bucket_of(spec)
    arrays = _arrays(spec, bucket)
    arrays.update(_padded_extra(spec, bucket))
    ints = _pack(int_fields(bucket), arrays, np.dtype(np.int32))
    floats = _pack(float_fields(bucket), arrays, np.dtype(np.float32))
    return StepBatch(
        bucket=bucket,
        ints=ints,
        floats=floats,
        live_tokens=sum(row.num_tokens for row in spec.rows),
        live_seqs=len(spec.rows),
        max_seq_len=max(row.seq_len for row in spec.rows),
    )


def live_rows(spec: BatchSpec) -> npt.NDArray[np.int64]:
    """Returns the row of the bucket that each row of the spec stands in."""
    index = np.arange(len(spec.rows))
    return index + np.where(index >= spec.num_decodes, spec.padding.decodes, 0)


def live_tokens(spec: BatchSpec) -> npt.NDArray[np.int64]:
    """Returns the token of the bucket that each live token stands in."""
    index = np.arange(sum(row.num_tokens for row in spec.rows))
    return index + np.where(index >= spec.num_decodes, spec.padding.decodes, 0)


def _arrays(spec: BatchSpec, bucket: Bucket) -> dict[str, npt.NDArray[Any]]:
    tokens, rows = live_tokens(spec), live_rows(spec)
    positions = np.zeros(bucket.num_tokens, np.int32)
    slots = np.zeros(bucket.num_tokens, np.int32)
    live = [_positions(row) for row in spec.rows]
    positions[tokens] = np.concatenate(live)
    slots[tokens] = np.concatenate(
        [_slots(row, at, spec.block_size) for row, at in zip(spec.rows, live, strict=True)]
    )
    seq_lens = np.zeros(bucket.num_seqs, np.int32)
    seq_lens[rows] = [row.seq_len for row in spec.rows]
    block_table = np.zeros((bucket.num_seqs, bucket.num_blocks), np.int32)
    for place, row in zip(rows, spec.rows, strict=True):
        block_table[place, : len(row.blocks)] = row.blocks
    counts = np.zeros(bucket.num_seqs, np.int32)
    counts[: bucket.num_decodes] = 1
    counts[rows] = [row.num_tokens for row in spec.rows]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return {
        "query_start": query_start,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "slots": slots,
        "positions": positions,
    }


def _positions(row: Row) -> npt.NDArray[np.int32]:
    return np.arange(row.seq_len - row.num_tokens, row.seq_len, dtype=np.int32)


def _slots(row: Row, positions: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    blocks = np.asarray(row.blocks, np.int32)
    return blocks[positions // size] * size + positions % size


def _padded_extra(spec: BatchSpec, bucket: Bucket) -> dict[str, npt.NDArray[Any]]:
    """Puts the given live values where their tokens or rows stand; the rest is zero."""
    shapes = dict(int_fields(bucket)) | dict(float_fields(bucket))
    out = {}
    for name, shape in shapes.items():
        given = spec.extra.get(name)
        full = np.zeros(shape, np.float32 if name in dict(float_fields(bucket)) else np.int32)
        if name == "top_p":
            full[:] = 1.0
        if given is not None:
            full[_places(name, spec, bucket, len(given))] = given
        if name not in ("query_start", "seq_lens", "block_table", "slots", "positions"):
            out[name] = full
    return out


def _places(name: str, spec: BatchSpec, bucket: Bucket, count: int) -> npt.NDArray[np.int64]:
    if name == "token_ids":
        return live_tokens(spec)
    if name in ("logits_idx", "targets") and count == bucket.num_logits:
        return np.arange(count)
    return live_rows(spec)


def _pack(
    fields: Sequence[tuple[str, tuple[int, ...]]],
    arrays: Mapping[str, npt.NDArray[Any]],
    dtype: np.dtype[Any],
) -> npt.NDArray[Any]:
    parts = [np.asarray(arrays[name], dtype).reshape(-1) for name, _ in fields]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


__all__ = ["BatchSpec", "Padding", "Row", "bucket_of", "live_rows", "live_tokens", "make_batch"]
