"""What the engine tells the outside about a request: deltas, one per productive step."""

from __future__ import annotations

from dataclasses import dataclass, field

from leadframe.request import FinishReason
from leadframe.runner.result import TokenLogprobs

__all__ = ["Completion", "EngineHealth", "RequestOutput", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new about a request since its last output.

    Attributes:
      request_id: the request.
      token_ids: tokens that are new; an end-of-sequence token is included.
      text: text that is new and final; text that may still become a stop string, or half of a
        character, is held back.
      logprobs: one entry for each new token, when they were asked for.
      prompt_logprobs: one entry for each prompt token, once, when they were asked for.
      finish_reason: set on the last output of a request, None before.
      stop_reason: the stop string or id that ended it.
      error: what went wrong, when `finish_reason` is ERROR.
      num_prompt_tokens: tokens of the prompt.
      num_cached_tokens: of those, served by the prefix cache.
      num_output_tokens: tokens generated so far.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether this is the last output."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine is alive and moving.

    Attributes:
      ready: the model is loaded and steps can run.
      alive: the loop runs, and it is idle or its last step is recent.
      running: requests that hold blocks.
      waiting: requests that do not.
      seconds_since_progress: since the last step ended, while there is work; 0 when idle.
      reason: why it is not alive, in one line; empty when it is.
    """

    ready: bool
    alive: bool
    running: int = 0
    waiting: int = 0
    seconds_since_progress: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Completion:
    """The whole result of one request, for callers that do not stream.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: every generated token.
      text: every generated character.
    """

    request_id: str
    prompt_token_ids: list[int]
    prompt: str | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Appends a delta."""
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.error
        self.num_cached_tokens = output.num_cached_tokens
