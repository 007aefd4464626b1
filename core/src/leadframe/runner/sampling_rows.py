"""What the sampler needs of every running request, in arrays indexed by block-table row.

A row is filled once, when its request gets it, so that a step only gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leadframe.platform.batch import SampleVariant, StepArrays
from leadframe.request import Request
from leadframe.runner.buckets import bucketed_logprobs
from leadframe.runner.logit_edits import LogitEdits
from leadframe.runner.uniforms import WINDOW, uniform_windows

_RowEdits = tuple[
    int, npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32], bool
]
"""(index of the scheduled row, ids, scale, add, keep_only)."""

DRAWS = 1
"""Flag: the request draws its tokens; otherwise it takes the argmax."""
FILTERS = 2
"""Flag: it draws, and top_k or top_p is on."""
EDITS = 4
"""Flag: it edits its logits."""
LOGPROBS = 8
"""Flag: it wants log-probabilities of its tokens."""
MASKS = 16
"""Flag: a constraint masks its tokens."""


class SamplingRows:
    """Sampling settings and uniforms of up to `num_rows` requests.

    Attributes:
      flags: uint8 [rows], of the constants above.
      temperature, top_p, min_p: float32 [rows]; 0, 1 and 0 for greedy requests.
      top_k: int32 [rows]; 0 for greedy requests.
      num_logprobs: int32 [rows]; 0 where none are wanted.
      edits: the edits of each row; None where there are none.
    """

    def __init__(self, num_rows: int) -> None:
        self.flags = np.zeros(num_rows, np.uint8)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.zeros(num_rows, np.int32)
        self.edits: list[LogitEdits | None] = [None] * num_rows
        self._owners: list[Request | None] = [None] * num_rows
        self._seeds = np.zeros(num_rows, np.uint64)
        self._windows = np.full(num_rows, -1, np.int64)
        self._uniforms = np.zeros((num_rows, WINDOW), np.float32)

    def gather(
        self,
        requests: Sequence[Request],
        table_rows: npt.NDArray[np.int64],
        samples: npt.NDArray[np.bool_],
        scored_logprobs: int | None,
    ) -> SamplingStep:
        """Collects what one step's rows ask of the sampler.

        Args:
          requests: of the scheduled rows.
          table_rows: [rows].
          samples: [rows], whether the row samples.
          scored_logprobs: log-probabilities wanted of prompt tokens; None if none is scored.
        """
        rows = table_rows.tolist()
        if [self._owners[row] for row in rows] != list(requests):
            for row, request in zip(rows, requests, strict=True):
                if self._owners[row] is not request:
                    self._fill(row, request)
        return SamplingStep(self, requests, table_rows, samples, scored_logprobs)

    def uniforms(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Returns the draws of output positions, float32 [N]."""
        windows, offsets = np.divmod(positions, WINDOW)
        stale = self._windows[rows] != windows
        if stale.any():
            chosen = rows[stale]
            self._uniforms[chosen] = uniform_windows(self._seeds[chosen], windows[stale])
            self._windows[chosen] = windows[stale]
        return self._uniforms[rows, offsets]

    def _fill(self, row: int, request: Request) -> None:
        params = request.params
        greedy = params.is_greedy
        top_k = max(params.top_k, 0)
        self._owners[row] = request
        self._seeds[row] = request.seed % 2**64
        self._windows[row] = -1
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_p[row] = 1.0 if greedy else params.top_p
        self.min_p[row] = 0.0 if greedy else params.min_p
        self.top_k[row] = 0 if greedy else top_k
        self.num_logprobs[row] = params.logprobs or 0
        self.edits[row] = LogitEdits(request) if LogitEdits.are_needed(request) else None
        self.flags[row] = (
            DRAWS * (not greedy)
            | FILTERS * (not greedy and (top_k > 0 or params.top_p < 1.0))
            | EDITS * (self.edits[row] is not None)
            | LOGPROBS * (params.logprobs is not None)
            | MASKS * (request.constraint is not None)
        )


class SamplingStep:
    """What the rows of one step ask of the sampler.

    Attributes:
      variant: how tokens are chosen.
      num_edits: the most edits of a row.
      num_logprobs: top log-probabilities to return, one of few values; None for none.
      num_mask_words: words of the token mask; 0 where no row has one.
    """

    def __init__(
        self,
        rows: SamplingRows,
        requests: Sequence[Request],
        table_rows: npt.NDArray[np.int64],
        samples: npt.NDArray[np.bool_],
        scored_logprobs: int | None,
    ) -> None:
        self._rows, self._requests, self._table_rows = rows, requests, table_rows
        self._flags = rows.flags[table_rows] * samples
        self.flags = int(np.bitwise_or.reduce(self._flags))
        self.variant = self._variant(bool(samples.any()) or scored_logprobs is not None)
        self.num_logprobs = self._num_logprobs(scored_logprobs)
        self._masks = self._collect_masks() if self.flags & MASKS else {}
        self.num_mask_words = max(map(len, self._masks.values()), default=0)
        self._edits = self._collect_edits() if self.flags & EDITS else []
        self.num_edits = max((len(ids) for _, ids, _, _, _ in self._edits), default=0)

    def fill(self, arrays: StepArrays) -> None:
        """Writes the sampler's arrays; padded rows take the argmax and edit nothing."""
        rows, source, n = self._rows, self._table_rows, len(self._requests)
        if arrays.temperature is not None:
            arrays.temperature[:n] = rows.temperature[source]
            arrays.min_p[:n] = rows.min_p[source]
            self._fill_uniforms(arrays)
        if arrays.top_k is not None:
            arrays.top_p[:] = 1.0
            arrays.top_p[:n] = rows.top_p[source]
            arrays.top_k[:n] = rows.top_k[source]
        if arrays.edit_ids is not None:
            arrays.edit_scale[:] = 1.0
            self._fill_edits(arrays)
        for index, mask in self._masks.items():
            arrays.token_mask[index] = mask

    def _fill_uniforms(self, arrays: StepArrays) -> None:
        drawn = np.flatnonzero(self._flags & DRAWS)
        counts = [len(self._requests[i].output_token_ids) for i in drawn.tolist()]
        positions = np.fromiter(counts, np.int64, len(counts))
        arrays.uniform[drawn] = self._rows.uniforms(self._table_rows[drawn], positions)

    def _fill_edits(self, arrays: StepArrays) -> None:
        edits = [edit for edit in self._edits if len(edit[1])]
        if not edits:
            return
        rows, *columns, keep_only = zip(*edits, strict=True)
        chosen = list(rows)
        counts = np.fromiter(map(len, columns[0]), np.int64, len(edits))
        is_edit = np.arange(arrays.edit_ids.shape[1]) < counts[:, None]
        firsts = np.cumsum(counts) - counts
        targets = (arrays.edit_ids, arrays.edit_scale, arrays.edit_add)
        for target, parts in zip(targets, columns, strict=True):
            values = np.concatenate(parts)
            # Padding repeats the first edit: with keep_only, a harmless other id would be kept.
            block = np.repeat(values[firsts, None], target.shape[1], axis=1)
            block[is_edit] = values
            target[chosen] = block
        arrays.keep_only[chosen] = keep_only

    def _variant(self, wants_logits: bool) -> SampleVariant:
        if not wants_logits:
            return "skip"
        if not self.flags & DRAWS:
            return "greedy"
        if not self.flags & FILTERS:
            return "plain"
        return "sort" if any(request.needs_sort for request in self._requests) else "threshold"

    def _num_logprobs(self, scored_logprobs: int | None) -> int | None:
        wanted = self._flags & LOGPROBS > 0
        if not wanted.any() and scored_logprobs is None:
            return None
        sampled = (self._rows.num_logprobs[self._table_rows] * wanted).max()
        return bucketed_logprobs(max(int(sampled), scored_logprobs or 0))

    def _collect_edits(self) -> list[_RowEdits]:
        collected = []
        for index in np.flatnonzero(self._flags & EDITS).tolist():
            edits = self._rows.edits[self._table_rows[index]]
            if edits is not None:
                mask = self._masks.get(index)
                collected.append((index, *edits.current(mask), edits.keep_only))
        return collected

    def _collect_masks(self) -> dict[int, npt.NDArray[np.int32]]:
        """The masks of the scheduled rows that have one, by index."""
        indices = np.flatnonzero(self._flags & MASKS).tolist()
        constraints = ((index, self._requests[index].constraint) for index in indices)
        return {index: c.mask() for index, c in constraints if c is not None}
