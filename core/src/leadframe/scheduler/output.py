"""What the scheduler chose for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leadframe.request import Request


class ScheduledRow(NamedTuple):
    """Tokens [start, start + num_tokens) of one request.

    Attributes:
      request: whose tokens.
      start: the first token to compute; everything before it is in the cache.
      num_tokens: at least 1.
      samples: the row reaches the request's last known token and wants the next one.
      table_row: where the request's block table is in `SchedulerOutput.block_tables`.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    table_row: int


make_row: Callable[[tuple[Request, int, int, bool, int]], ScheduledRow]
make_row = partial(tuple.__new__, ScheduledRow)
"""Builds a row from its fields at half the cost of the constructor; it runs for every decode."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work.

    Attributes:
      rows: `num_decodes` rows that compute one token and sample, then the others.
      num_decodes: the leading rows of that kind.
      num_tokens: tokens of all rows.
      preempted: requests that lost their blocks to this step.
      block_tables: int32 [rows, width], the live block tables of all running requests; only
        valid until the scheduler is called again.
    """

    rows: list[ScheduledRow]
    num_decodes: int
    num_tokens: int
    preempted: list[Request]
    block_tables: npt.NDArray[np.int32]
