"""A request: what a client asked, and how far it has come.

A request knows token counts, not phases: the scheduler lets `num_computed_tokens` catch up with
`num_tokens`. Only the scheduler and the engine change a request.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from leadframe.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended; the value is what the API shows."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class RequestTimes:
    """Monotonic timestamps in seconds; None until it happens."""

    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


class TokenConstraint(Protocol):
    """What binds the tokens of an output. Its state depends on the output alone.

    Attributes:
      error: why no further token can be judged, if so: the request has to end.
    """

    error: str | None

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow it."""

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Reads the tokens of the output that it has not read yet."""

    def mask(self) -> npt.NDArray[np.int32]:
        """Returns the tokens that may not come next, int32 [W]: see `StepArrays.token_mask`."""


@dataclass(slots=True, eq=False)
class Request:
    """One token stream.

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: at least one token.
      params: how to sample.
      seed: fixes the draws; taken from `params.seed`, or fresh.
      stop_ids: token ids that end this request: end-of-sequence unless ignored, and
        `params.stop_token_ids`.
      max_total_tokens: prompt plus output tokens at which it ends with "length".
      priority: lower runs sooner, under the priority policy.
      cache_salt: separates prefix-cache entries of tenants; empty shares.
      output_token_ids: tokens sampled so far; survives preemption.
      num_computed_tokens: tokens whose K/V is in the cache and valid.
      num_cached_tokens: prompt tokens that the prefix cache served when it was first admitted.
      num_preemptions: times that all its blocks were taken.
      num_lost_tokens: leading tokens whose K/V a preemption took; what is computed of them from
        then on was computed before.
      needs_sort: a draw was not covered by the candidates once; sample by full sort from now on.
      stop_reason: the stop string or stop id that ended it, if one did.
      constraint: what binds its tokens; None leaves them free.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_total_tokens: int
    priority: int = 0
    cache_salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    needs_sort: bool = False
    constraint: TokenConstraint | None = None
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed.

        Once there is output, every prompt token has been scored: recomputing after a preemption
        does not score it again.
        """
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """Returns tokens [start, end) of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
