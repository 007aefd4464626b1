"""Request fields → SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadframe.models.info import GenerationDefaults
from leadframe.sampling_params import SamplingParams
from leadframe.server.schema import ChatBody, CompletionBody, SamplingBody
from leadframe.tokenizer import Tokenizer

_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
)
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SEEDS = 2**64


class ParamsReader:
    """Builds sampling parameters from request bodies.

    Args:
      tokenizer: turns `bad_words` into ids.
      recommended: the model's own defaults, for fields that a request leaves out; None for
        OpenAI's.
    """

    def __init__(self, tokenizer: Tokenizer, recommended: GenerationDefaults | None) -> None:
        self._tokenizer = tokenizer
        self._defaults: dict[str, Any] = {}
        if recommended is not None:
            values = {name: getattr(recommended, name) for name in _RECOMMENDED}
            self._defaults = {name: v for name, v in values.items() if v is not None}

    def for_completion(self, body: CompletionBody) -> list[SamplingParams]:
        """Returns one entry for each choice of a prompt.

        Raises:
          RequestError: a value is out of range.
        """
        fields = self._shared(body)
        if body.max_tokens is not None:
            fields["max_tokens"] = body.max_tokens
        fields["logprobs"] = body.logprobs
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
        return _choices(fields, body.num_choices)

    def for_chat(self, body: ChatBody) -> list[SamplingParams]:
        """Returns one entry for each choice.

        Raises:
          RequestError: a value is out of range.
        """
        fields = self._shared(body)
        fields["max_tokens"] = body.output_limit
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        return _choices(fields, body.num_choices)

    def _shared(self, body: SamplingBody) -> dict[str, Any]:
        given = {name: getattr(body, name) for name in _COPIED}
        fields = {name: value for name, value in given.items() if value is not None}
        if body.bad_words:
            fields["bad_words_ids"] = self._bad_words(body.bad_words)
        fields["structured_outputs"] = body.structured_outputs or body.response_format
        return {**self._defaults, **fields}

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Encodes each word as it stands at the start of a text and after a space."""
        sequences = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _choices(fields: Mapping[str, Any], num_choices: int) -> list[SamplingParams]:
    """Gives each choice a seed of its own: a seeded request repeats as a whole, choices differ."""
    first = SamplingParams(**fields)
    if num_choices == 1 or first.seed is None:
        return [first] * num_choices
    seeds = [_wrap(first.seed + index) for index in range(num_choices)]
    return [SamplingParams(**{**fields, "seed": seed}) for seed in seeds]


def _wrap(seed: int) -> int:
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
