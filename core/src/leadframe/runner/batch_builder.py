"""Packs what the scheduler chose into one StepBatch.

Knows requests, block tables and buckets. Must not know devices or models. Everything that is the
same in the next step stays in arrays (`SamplingRows`, the block tables of the KV cache manager);
a step gathers from them into two fresh buffers, which the backend may keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leadframe.errors import InternalError
from leadframe.platform.batch import Bucket, StepArrays, StepBatch, packed_sizes, unpack
from leadframe.request import Request
from leadframe.runner.buckets import BucketPolicy
from leadframe.runner.sampling_rows import SamplingRows, SamplingStep
from leadframe.scheduler.output import SchedulerOutput

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Consecutive prompt tokens of one request whose log-probabilities this step computes.

    Attributes:
      row_index: the scheduled row that they belong to.
      position: prompt position of the first token.
      num_tokens: how many.
      scored_row: the first one's row of logits, counted after the S rows that may sample.
    """

    row_index: int
    position: int
    num_tokens: int
    scored_row: int


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A batch whose row i, and row i of logits, is row i of the schedule.

    Attributes:
      batch: for the backend.
      scored: where the log-probabilities of prompt tokens are.
    """

    batch: StepBatch
    scored: tuple[ScoredTokens, ...]


class BatchBuilder:
    """Builds batches for one engine.

    Args:
      block_size: tokens per block.
      max_num_seqs: most rows of a step.
      policy: chooses the bucket.
    """

    def __init__(self, block_size: int, max_num_seqs: int, policy: BucketPolicy) -> None:
        self._block_size = block_size
        self._policy = policy
        self._sampling = SamplingRows(max_num_seqs)

    def build(self, output: SchedulerOutput) -> BuiltBatch:
        """Packs a step that has at least one row.

        Building again, after a request's `needs_sort` was set, gives the same batch in the "sort"
        variant.
        """
        step = _Step(output, self._block_size)
        scored = _scored_tokens(step)
        num_logprobs = _scored_logprobs(step, scored)
        sampling = self._sampling.gather(step.requests, step.table_rows, step.samples, num_logprobs)
        bucket = self._policy.bucket_for(_exact_bucket(step, scored, sampling))
        num_ints, num_floats = packed_sizes(bucket)
        ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
        arrays = unpack(bucket, ints, floats)
        num_decodes = _num_decode_rows(step, bucket)
        _fill_decodes(arrays, step, num_decodes)
        _fill_chunks(arrays, step, num_decodes)
        sampling.fill(arrays)
        _fill_scored(arrays, step, scored)
        batch = StepBatch(
            bucket=bucket,
            ints=ints,
            floats=floats,
            live_tokens=output.num_tokens,
            live_seqs=step.num_rows,
            max_seq_len=step.max_seq_len,
        )
        return BuiltBatch(batch, scored)


class _Step:
    """The scheduled rows as arrays, one entry a row.

    Attributes:
      starts, counts, ends: tokens [start, start + count) are computed.
      table_rows: rows of `tables`.
      samples: whether the row samples.
    """

    def __init__(self, output: SchedulerOutput, block_size: int) -> None:
        rows = output.rows
        self.num_rows = len(rows)
        self.num_decodes = output.num_decodes
        self.num_tokens = output.num_tokens
        self.block_size = block_size
        self.tables = output.block_tables
        self.requests: tuple[Request, ...]
        self.requests, starts, counts, samples, table_rows = zip(*rows, strict=True)
        # Filling a typed array is several times faster than letting NumPy find the type.
        self.starts: _Ints = np.fromiter(starts, np.int64, self.num_rows)
        self.counts: _Ints = np.fromiter(counts, np.int64, self.num_rows)
        self.samples: npt.NDArray[np.bool_] = np.fromiter(samples, bool, self.num_rows)
        self.table_rows: _Ints = np.fromiter(table_rows, np.int64, self.num_rows)
        self.ends: _Ints = self.starts + self.counts
        self.max_seq_len = int(self.ends.max())
        self.num_blocks = -(-self.max_seq_len // block_size)

    def slots(self, table_rows: _Ints, positions: _Ints) -> _Ints:
        """Where tokens go: [N] for rows of the block tables and positions, both [N]."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return self.tables[table_rows, blocks].astype(np.int64) * self.block_size + offsets

    def gather_tables(self, first: int, end: int, width: int) -> npt.NDArray[np.int32]:
        """The first `width` entries of the block tables of rows [first, end)."""
        chosen = self.table_rows[first:end]
        if self.tables.shape[1] <= 2 * width:
            return np.take(self.tables, chosen, axis=0, mode="clip")[:, :width]
        return self.tables[chosen, :width]


def _exact_bucket(step: _Step, scored: Sequence[ScoredTokens], sampling: SamplingStep) -> Bucket:
    num_scored = sum(s.num_tokens for s in scored)
    skips = sampling.variant == "skip"
    return Bucket(
        num_tokens=step.num_tokens,
        num_seqs=step.num_rows,
        num_decodes=step.num_decodes,
        num_blocks=step.num_blocks,
        num_logits=0 if skips else step.num_rows + num_scored,
        sample=sampling.variant,
        num_edits=sampling.num_edits,
        num_logprobs=sampling.num_logprobs,
        num_mask_words=sampling.num_mask_words,
    )


def _num_decode_rows(step: _Step, bucket: Bucket) -> int:
    """How many of the scheduled decodes become decode rows: all, or none if the bucket has none."""
    if not bucket.num_decodes:
        return 0
    if bucket.num_decodes != step.num_decodes < step.num_rows:
        raise InternalError(f"{bucket} pads decodes before chunks, which would move the chunks")
    return step.num_decodes


def _fill_decodes(arrays: StepArrays, step: _Step, num_decodes: int) -> None:
    """Fills rows [0, D), padding included: row i owns token i."""
    n, padded = num_decodes, arrays.bucket.num_decodes
    arrays.query_start[: padded + 1] = np.arange(padded + 1)
    if arrays.bucket.num_logits:
        arrays.logits_idx[:padded] = np.arange(padded)
    starts = step.starts[:n]
    table = step.gather_tables(0, n, arrays.bucket.num_blocks)
    arrays.seq_lens[:n] = step.ends[:n]
    arrays.block_table[:n, : table.shape[1]] = table
    arrays.slots[:n] = step.slots(step.table_rows[:n], starts)
    arrays.positions[:n] = starts
    arrays.token_ids[:n] = [
        request.output_token_ids[-1] if request.output_token_ids else request.prompt_token_ids[-1]
        for request in step.requests[:n]
    ]


def _fill_chunks(arrays: StepArrays, step: _Step, first: int) -> None:
    """Fills rows [D, S) and their tokens with the scheduled rows from `first` on."""
    row = arrays.bucket.num_decodes
    num_rows = step.num_rows - first
    counts, starts, ends = step.counts[first:], step.starts[first:], step.ends[first:]
    offsets = row + np.concatenate([[0], np.cumsum(counts)])
    token, end_token, end_row = row, int(offsets[-1]), row + num_rows
    arrays.query_start[row : end_row + 1] = offsets
    arrays.query_start[end_row + 1 :] = end_token
    if not num_rows:
        return
    owner = np.repeat(np.arange(num_rows), counts)
    positions = np.arange(token, end_token) - offsets[owner] + starts[owner]
    arrays.positions[token:end_token] = positions
    arrays.slots[token:end_token] = step.slots(step.table_rows[first:][owner], positions)
    token_ids: list[int] = []
    for request, start, end in zip(
        step.requests[first:], starts.tolist(), ends.tolist(), strict=True
    ):
        token_ids += request.token_ids(start, end)
    arrays.token_ids[token:end_token] = token_ids
    arrays.seq_lens[row:end_row] = ends
    # The whole prompt has blocks already; entries that this step does not reach stay 0.
    table = step.gather_tables(first, step.num_rows, arrays.bucket.num_blocks)
    reached = np.arange(table.shape[1]) < -(-ends[:, None] // step.block_size)
    arrays.block_table[row:end_row, : table.shape[1]] = table * reached
    if arrays.bucket.num_logits:
        arrays.logits_idx[row:end_row] = offsets[1:] - 1


def _scored_tokens(step: _Step) -> tuple[ScoredTokens, ...]:
    """The prompt tokens to score: those that a computed prompt token predicts."""
    scored: list[ScoredTokens] = []
    total = 0
    for index in range(step.num_decodes, step.num_rows):
        request = step.requests[index]
        if not request.scores_prompt:
            continue
        start, end = int(step.starts[index]), int(step.ends[index])
        count = min(end, request.num_prompt_tokens - 1) - start
        if count > 0:
            scored.append(ScoredTokens(index, start + 1, count, total))
            total += count
    return tuple(scored)


def _scored_logprobs(step: _Step, scored: Sequence[ScoredTokens]) -> int | None:
    asked = [step.requests[s.row_index].params.prompt_logprobs or 0 for s in scored]
    return max(asked, default=None)


def _fill_scored(arrays: StepArrays, step: _Step, scored: Sequence[ScoredTokens]) -> None:
    for s in scored:
        request = step.requests[s.row_index]
        first = arrays.bucket.num_seqs + s.scored_row
        token = int(arrays.query_start[s.row_index])
        arrays.logits_idx[first : first + s.num_tokens] = np.arange(token, token + s.num_tokens)
        targets = request.prompt_token_ids[s.position : s.position + s.num_tokens]
        arrays.targets[first : first + s.num_tokens] = targets
