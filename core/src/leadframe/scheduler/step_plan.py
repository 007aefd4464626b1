"""One step while it is being put together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leadframe.request import Request
from leadframe.scheduler.output import ScheduledRow, SchedulerOutput


class StepPlan:
    """Rows chosen so far and what is left to give.

    Attributes:
      budget: tokens that may still be scheduled.
      scored_budget: prompt tokens that may still be scored.
      decodes: rows that compute one token and sample.
      preempted: requests that lost their blocks to this step.
    """

    def __init__(self, budget: int, scored_budget: int) -> None:
        self.budget = budget
        self.scored_budget = scored_budget
        self.decodes: list[ScheduledRow] = []
        self.preempted: list[Request] = []
        self._chunks: list[ScheduledRow] = []

    def add(self, request: Request, num_tokens: int, table_row: int) -> None:
        """Schedules the next `num_tokens` tokens of a request."""
        start = request.num_computed_tokens
        known = request.num_tokens
        samples = start + num_tokens == known and known < request.max_total_tokens
        row = ScheduledRow(request, start, num_tokens, samples, table_row)
        (self.decodes if samples and num_tokens == 1 else self._chunks).append(row)
        self.budget -= num_tokens

    def cancel(self, victim: Request) -> None:
        """Notes that a request lost its blocks; if it has a row, the row goes."""
        self.decodes[:] = [row for row in self.decodes if row.request is not victim]
        self.preempted.append(victim)

    def output(self, block_tables: npt.NDArray[np.int32]) -> SchedulerOutput:
        """Returns the finished step."""
        rows = self.decodes + self._chunks
        return SchedulerOutput(
            rows=rows,
            num_decodes=len(self.decodes),
            num_tokens=len(self.decodes) + sum(row.num_tokens for row in self._chunks),
            preempted=self.preempted,
            block_tables=block_tables,
        )
