"""What one step produced, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field


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
