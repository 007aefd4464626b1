"""Turns sampled tokens into text and outputs, and finds stop strings.

It runs in the engine's thread. A request with stop strings is looked at inside the step that
sampled the token, so that one ends it in that very step: no token is computed past it, and its
blocks are free at once. The others wait until the device has its next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from leadframe.engine.outputs import RequestOutput, TokenLogprobs
from leadframe.request import FinishReason, Request
from leadframe.sampling_params import SamplingParams
from leadframe.tokenizer import Detokenizer, StopChecker, Tokenizer


@dataclass(slots=True)
class _Stream:
    """The text side of one request."""

    request: Request
    detokenizer: Detokenizer | None
    stops: StopChecker
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs_sent: bool = False
    matched: bool = False


class OutputProcessor:
    """Holds the text state of live requests.

    Args:
      tokenizer: turns tokens into text; None serves requests with `detokenize` off only.
      eos_token_ids: tokens that never become text when they end a request.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: Request) -> None:
        """Starts the text of a request."""
        params = request.params
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = Detokenizer(
                self._tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._streams[request.request_id] = _Stream(request, detokenizer, stops)

    def score(self, request: Request, position: int, entry: TokenLogprobs) -> None:
        """Records the log-probabilities of one prompt token.

        A preempted request scores its prompt again; what was sent stays sent.
        """
        stream = self._streams.get(request.request_id)
        if stream is not None and not stream.prompt_logprobs_sent:
            stream.prompt_logprobs[position] = entry

    def token(self, request: Request, token: int) -> tuple[str, str | None]:
        """Takes one sampled token.

        Returns:
          The text that is now final, and the stop string that ended the request, if one did.
        """
        stream = self._streams[request.request_id]
        if stream.detokenizer is None or self._is_silent(request, token):
            return "", None
        text = stream.detokenizer.push([token])
        armed = len(request.output_token_ids) >= request.params.min_tokens
        emitted, stop = stream.stops.push(text, armed=armed)
        stream.matched = stop is not None
        return emitted, stop

    def finish(self, request: Request) -> str:
        """Ends the text of a request and returns what was still held back."""
        stream = self._streams.pop(request.request_id)
        self._name_special_stop(request)
        if stream.detokenizer is None or stream.matched:
            return ""
        tail = stream.detokenizer.finish()
        emitted, matched = stream.stops.push(tail) if tail else ("", None)
        if matched is not None:
            request.stop_reason = matched
            return emitted
        return emitted + stream.stops.flush()

    def special_stops(self, params: SamplingParams) -> dict[int, str]:
        """Returns the stop strings that are the text of a special token, by its id.

        Their text never appears when special tokens are skipped, so the token itself must stop.
        """
        if self._tokenizer is None or not params.skip_special_tokens:
            return {}
        ids = {text: self._tokenizer.special_token_id(text) for text in params.stop}
        return {token: text for text, token in ids.items() if token is not None}

    def _name_special_stop(self, request: Request) -> None:
        if request.finish_reason is FinishReason.STOP and request.stop_reason is None:
            stops = self.special_stops(request.params)
            request.stop_reason = stops.get(request.output_token_ids[-1])

    def discard(self, request: Request) -> None:
        """Forgets a request that was aborted."""
        self._streams.pop(request.request_id, None)

    def take_prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs, ...] | None:
        """Returns the prompt's log-probabilities once, when all of them are known."""
        stream = self._streams.get(request.request_id)
        if stream is None or stream.prompt_logprobs_sent:
            return None
        if request.params.prompt_logprobs is None:
            return None
        missing = request.num_prompt_tokens - 1 - len(stream.prompt_logprobs)
        if missing:
            return None
        stream.prompt_logprobs_sent = True
        first = TokenLogprobs(request.prompt_token_ids[0], None)
        rest = (stream.prompt_logprobs[i] for i in range(1, request.num_prompt_tokens))
        entries = (first, *rest)
        stream.prompt_logprobs = {}
        return entries

    def _is_silent(self, request: Request, token: int) -> bool:
        ended_by_eos = (
            request.finish_reason is FinishReason.STOP
            and token in self._eos_token_ids
            and not request.params.ignore_eos
        )
        return ended_by_eos and len(request.output_token_ids) >= request.params.min_tokens


def make_output(
    request: Request,
    *,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> RequestOutput:
    """Builds the output of a request from its present state and what is new."""
    return RequestOutput(
        request_id=request.request_id,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=len(request.output_token_ids),
    )
