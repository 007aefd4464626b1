"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from leadframe.engine.outputs import Completion, RequestOutput
from leadframe.server.generation import Batch, Job
from leadframe.server.logprobs import JsonObject, chat_logprobs, prompt_logprobs
from leadframe.server.replies import JsonReply
from leadframe.server.schema import ChatBody
from leadframe.server.services import FINGERPRINT, Services, new_id
from leadframe.server.streaming import EventStream, event, for_request


async def create_chat_completion(services: Services, request: Request) -> Response:
    """Answers one chat request.

    Raises:
      HttpError, RequestError: it cannot be served.
      ClientGone: the client closed the connection.
    """
    body = await services.read(request, ChatBody)
    model = services.check_model(body.model)
    services.check_accepting(body)
    prompt = await services.prompts.chat(body)
    params = services.params.for_chat(body)
    reply = _Reply(services, body, model)
    batch = await for_request(request, services.submit(reply.id, body, [prompt], params))
    if body.stream:
        return EventStream(reply.stream(batch), batch.close)
    completions = await for_request(request, batch.collect())
    return JsonReply(reply.whole(batch, completions))


class _Reply:
    """Shapes the reply to one request, whole or in chunks."""

    def __init__(self, services: Services, body: ChatBody, model: str) -> None:
        self.id, self._created = new_id("chatcmpl"), int(time.time())
        self._tokenizer = services.engine.tokenizer
        self._body, self._model = body, model

    def whole(self, batch: Batch, completions: Sequence[Completion]) -> JsonObject:
        """Returns the body of a reply that is not streamed."""
        choices = [self._whole_choice(index, done) for index, done in enumerate(completions)]
        reply = self._envelope("chat.completion", choices)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = batch.jobs[0].prompt.token_ids
        if self._body.prompt_logprobs is not None:
            entries = completions[0].prompt_logprobs or ()
            reply["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries)
        return {**reply, "usage": batch.usage.to_json()}

    async def stream(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed reply; the first of each choice carries the role."""
        started: set[int] = set()
        async with aclosing(batch.outputs()) as outputs:
            async for index, output in outputs:
                if index not in started:
                    started.add(index)
                    yield self._first_event(index, batch.jobs[index])
                choice = self._chunk(index, output)
                if choice is not None:
                    yield self._event([choice])
        if self._body.include_usage:
            envelope = self._envelope("chat.completion.chunk", [])
            yield event({**envelope, "usage": batch.usage.to_json()})

    def _whole_choice(self, index: int, done: Completion) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "message": {"role": "assistant", "content": done.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _reason(done),
            "stop_reason": done.stop_reason,
        }
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, done.logprobs or ())
        if self._body.return_token_ids:
            choice["token_ids"] = done.token_ids
        return choice

    def _first_event(self, index: int, job: Job) -> bytes:
        choice: JsonObject = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        envelope = self._stream_envelope([choice])
        if self._body.return_token_ids:
            envelope["prompt_token_ids"] = job.prompt.token_ids
        return event(envelope)

    def _chunk(self, index: int, output: RequestOutput) -> JsonObject | None:
        """Returns the choice of one chunk, or None when there is nothing to say yet."""
        entries = output.logprobs if self._body.logprobs else None
        if not (output.text or entries or output.finished or self._body.return_token_ids):
            return None
        choice: JsonObject = {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": chat_logprobs(self._tokenizer, entries) if entries else None,
            "finish_reason": _reason(output),
        }
        if output.finished:
            choice["stop_reason"] = output.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _event(self, choices: list[JsonObject]) -> bytes:
        return event(self._stream_envelope(choices))

    def _stream_envelope(self, choices: list[JsonObject]) -> JsonObject:
        envelope = self._envelope("chat.completion.chunk", choices)
        return {**envelope, "usage": None} if self._body.include_usage else envelope

    def _envelope(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def _reason(output: RequestOutput | Completion) -> str | None:
    return None if output.finish_reason is None else output.finish_reason.value
