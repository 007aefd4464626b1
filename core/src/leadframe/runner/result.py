"""What one step produced, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from leadframe.runner.batch_builder import BuiltBatch
from leadframe.scheduler.output import ScheduledRow, SchedulerOutput

HostArrays = Mapping[str, npt.NDArray[Any]]
"""A step's outputs by name, downloaded; see `leadframe.runner.step.ModelStep`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw logits.

    Attributes:
      token_id: the token that stands at this position.
      logprob: its log-probability; None for the first prompt token, which nothing predicts.
      rank: its rank, 1 for the most likely.
      top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float | None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """The host side of one executed step. Lists are aligned with the rows of the schedule.

    Attributes:
      tokens: the sampled token of each row; None where the row did not sample.
      finite: whether the logits that a row needed were finite.
      logprobs: of the sampled token, where its request asked for them.
      scored: (row index, prompt position, log-probabilities) of prompt tokens.
    """

    tokens: list[int | None]
    finite: list[bool]
    logprobs: list[TokenLogprobs | None]
    scored: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)


def read_result(schedule: SchedulerOutput, built: BuiltBatch, host: HostArrays) -> StepResult:
    """Reads the outputs of a step back into the order of the schedule's rows."""
    rows = schedule.rows
    result = StepResult([None] * len(rows), [True] * len(rows), [None] * len(rows))
    if "finite" not in host:
        return result
    tokens, finite = host["tokens"].tolist(), host["finite"].tolist()
    if schedule.num_decodes == len(rows) and "logprob" not in host and all(finite[: len(rows)]):
        result.tokens = tokens[: len(rows)]
        return result
    for index, row in enumerate(rows):
        if not row.samples:
            continue
        result.finite[index] = finite[index]
        if finite[index]:
            result.tokens[index] = tokens[index]
            result.logprobs[index] = _sampled_logprobs(row, tokens[index], host, index)
    _read_scored(schedule, built, host, result)
    return result


def _sampled_logprobs(
    row: ScheduledRow, token: int, host: HostArrays, index: int
) -> TokenLogprobs | None:
    count = row.request.params.logprobs
    return None if count is None else _entry(token, host, "", index, count)


def _read_scored(
    schedule: SchedulerOutput, built: BuiltBatch, host: HostArrays, result: StepResult
) -> None:
    num_sampling = built.batch.bucket.num_seqs
    for scored in built.scored:
        request = schedule.rows[scored.row_index].request
        count = request.params.prompt_logprobs or 0
        for i in range(scored.num_tokens):
            row, position = scored.scored_row + i, scored.position + i
            if not host["finite"][num_sampling + row]:
                result.finite[scored.row_index] = False
                result.tokens[scored.row_index] = None
                break
            token = request.prompt_token_ids[position]
            entry = _entry(token, host, "scored_", row, count)
            result.scored.append((scored.row_index, position, entry))


def _entry(token: int, host: HostArrays, prefix: str, row: int, count: int) -> TokenLogprobs:
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = host[prefix + "top_ids"][row, :count].tolist()
        values = host[prefix + "top_logprobs"][row, :count].tolist()
        top = tuple(zip(ids, values, strict=True))
    logprob, rank = host[prefix + "logprob"][row], host[prefix + "rank"][row]
    return TokenLogprobs(token, float(logprob), int(rank), top)
