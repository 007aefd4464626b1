"""What a request asks of the sampler, checked when it is built.

Field names, defaults and bounds are those that users of OpenAI-compatible servers know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from leadframe.errors import RequestError, shown
from leadframe.structured_outputs import StructuredOutputs

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_EDITS = 1024
MAX_BAD_WORDS = 1024
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")


def _bad(param: str, value: object, rule: str) -> RequestError:
    text = shown(value, f"a {type(value).__name__} with ")
    return RequestError(f"{param} is {text}; it must be {rule}", param=param)


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number in [low, high], as NaN never is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return low <= value <= high


def _number(param: str, value: object, low: float, high: float, rule: str) -> None:
    if not _is_number(value, low, high):
        raise _bad(param, value, rule)


def _is_text(value: object) -> bool:
    """Whether a value is a string that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _integer(param: str, value: object, low: int, high: int, rule: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(param, value, rule)


def _list(param: str, value: object, most: int, what: str, least: int = 0) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or not least <= len(value) <= most:  # type: ignore[arg-type]
        bounds = f"at most {most}" if least == 0 else f"{least} to {most}"
        raise _bad(param, value, f"a list of {bounds} {what}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Attributes:
      temperature: [0, 2]; below 1e-5 is greedy.
      top_p: (0, 1].
      top_k: 0 or -1 is off.
      min_p: [0, 1], relative to the largest probability.
      presence_penalty: [-2, 2], on tokens that were generated.
      frequency_penalty: [-2, 2], on tokens that were generated.
      repetition_penalty: (0, 10], on tokens of the prompt and of the output.
      seed: fixes the draws; None takes a fresh seed.
      max_tokens: most tokens to generate; without it, what the context holds.
      min_tokens: end-of-sequence, stop ids and stop strings are held back until then.
      stop: strings that end the output; they are not part of it. Null is an empty list, here
        and in every other field that is a list or a mapping.
      stop_token_ids: ids that end the output.
      include_stop_str_in_output: keep the stop string at the end of the text.
      ignore_eos: go on after the end-of-sequence token.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: produce text; `stop` needs it.
      logprobs: log-probabilities to return per token, besides the sampled one's; None for none.
      prompt_logprobs: the same for prompt tokens; None for none.
      logit_bias: token id → [-100, 100], added to its logit.
      allowed_token_ids: the only ids that may be sampled; None allows all.
      bad_words_ids: id sequences that must not be completed.
      structured_outputs: what the text must match, as `StructuredOutputs` or as its one field;
        None leaves it free.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    structured_outputs: StructuredOutputs | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
          RequestError: a field is out of its range; `param` names it.
        """
        self._normalise()
        self._check_flags()
        self._check_distribution()
        self._check_lengths()
        self._check_stops()
        self._check_tokens()
        self._check_structure()

    @property
    def wanted(self) -> StructuredOutputs | None:
        """The constraint on the text, checked."""
        wanted = self.structured_outputs
        return wanted if isinstance(wanted, StructuredOutputs) else None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens that are already there."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        empty: dict[str, object] = {
            "stop": (),
            "stop_token_ids": (),
            "bad_words_ids": (),
            "logit_bias": {},
        }
        for name, value in empty.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if isinstance(self.structured_outputs, Mapping):
            wanted = StructuredOutputs.from_mapping(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", wanted)

    def _check_flags(self) -> None:
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")

    def _check_distribution(self) -> None:
        _number("temperature", self.temperature, 0, 2, "a number in [0, 2]")
        _number("top_p", self.top_p, 1e-9, 1, "a number in (0, 1]")
        _integer("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 (off), or a positive integer")
        _number("min_p", self.min_p, 0, 1, "a number in [0, 1]")
        _number("presence_penalty", self.presence_penalty, -2, 2, "a number in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "a number in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 10, "a number in (0, 10]")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit integer")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1, "an integer of at least 0")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]")

    def _check_stops(self) -> None:
        _list("stop", self.stop, MAX_STOP_STRINGS, "non-empty strings")
        if not all(map(_is_text, self.stop)):
            raise _bad("stop", list(self.stop), "a list of non-empty strings of valid Unicode")
        if self.stop and not self.detokenize:
            raise _bad("stop", list(self.stop), "empty when detokenize is off")
        _list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")

    def _check_tokens(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise _bad("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_EDITS:
            raise _bad("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_EDITS} entries")
        for token, bias in self.logit_bias.items():
            if not _is_number(bias, -100, 100):
                raise _bad("logit_bias", {token: bias}, "made of numbers in [-100, 100]")
        if self.allowed_token_ids is not None:
            _list("allowed_token_ids", self.allowed_token_ids, MAX_LOGIT_EDITS, "token ids", 1)
        _list("bad_words", self.bad_words_ids, MAX_BAD_WORDS, "lists of token ids")
        for words in self.bad_words_ids:
            _list("bad_words", words, MAX_BAD_WORDS, "token ids in each entry", 1)

    def _check_structure(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputs):
            raise _bad("structured_outputs", wanted, "a StructuredOutputs or a mapping")
        if self.allowed_token_ids is not None:
            raise _bad("allowed_token_ids", self.allowed_token_ids, f"absent with {wanted.param}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks every token id against the width of the logits.

        Raises:
          RequestError: an id is outside [0, vocab_size).
        """
        ids: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": tuple(i for words in self.bad_words_ids for i in words),
        }
        for param, values in ids.items():
            for value in values:
                _integer(param, value, 0, vocab_size - 1, f"a token id in [0, {vocab_size})")


FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
