"""Checks that need the model, done before a request enters the queue."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from leadframe.errors import PromptTooLong, RequestError
from leadframe.request import Request
from leadframe.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model allows in a request.

    Attributes:
      vocab_size: width of the logits, which bounds every token id.
      eos_token_ids: tokens that end a request unless it ignores them.
      max_model_len: most tokens of prompt and output together.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int


def build_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: RequestLimits,
    *,
    seed: int,
    extra_stop_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    cache_salt: str = "",
) -> Request:
    """Builds a request that the engine can serve.

    Args:
      request_id: unique among live requests.
      prompt_token_ids: the prompt.
      params: how to sample.
      limits: what the model allows.
      seed: what the draws depend on.
      extra_stop_ids: further tokens that end the request.
      priority: lower runs sooner.
      cache_salt: separates prefix-cache entries.

    Raises:
      RequestError: the prompt is empty, or an id is outside the vocabulary.
      PromptTooLong: the prompt, or prompt and `max_tokens`, exceed `max_model_len`.
    """
    prompt = _checked_prompt(prompt_token_ids, limits.vocab_size)
    params.check_vocabulary(limits.vocab_size)
    stop_ids = extra_stop_ids.union(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= limits.eos_token_ids
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        seed=seed,
        stop_ids=stop_ids,
        max_total_tokens=_max_total_tokens(len(prompt), params, limits.max_model_len),
        priority=priority,
        cache_salt=cache_salt,
    )


def _checked_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Returns the ids as Python integers; NumPy's are taken too."""
    ids = [_token_id(token, vocab_size) for token in prompt]
    if not ids:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    return ids


def _token_id(token: object, vocab_size: int) -> int:
    is_integer = isinstance(token, SupportsIndex) and not isinstance(token, bool)
    value = operator.index(token) if is_integer else -1  # type: ignore[arg-type]
    if not 0 <= value < vocab_size:
        raise RequestError(
            f"prompt token {str(token)[:40]} is not a token id in [0, {vocab_size})",
            param="prompt",
        )
    return value


def _max_total_tokens(num_prompt: int, params: SamplingParams, max_model_len: int) -> int:
    asked = params.max_tokens
    room = max_model_len - num_prompt
    if room < 0 or (room == 0 and asked != 0):
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and the context holds {max_model_len}, "
            "prompt and output together; shorten the prompt",
            param="prompt",
        )
    if asked is None:
        return max_model_len
    if asked > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and max_tokens is {asked}, but the context "
            f"holds {max_model_len} together; ask for at most {room}",
            param="max_tokens",
        )
    return num_prompt + asked
