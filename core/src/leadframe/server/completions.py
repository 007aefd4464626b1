"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from leadframe.engine.outputs import Completion, RequestOutput, TokenLogprobs
from leadframe.server.generation import Batch, Job
from leadframe.server.logprobs import CompletionLogprobs, JsonObject, prompt_logprobs
from leadframe.server.replies import JsonReply
from leadframe.server.schema import CompletionBody
from leadframe.server.services import FINGERPRINT, Services, new_id
from leadframe.server.streaming import EventStream, event, for_request


async def create_completion(services: Services, request: Request) -> Response:
    """Answers one completion request.

    Raises:
      HttpError, RequestError: it cannot be served.
      ClientGone: the client closed the connection.
    """
    body = await services.read(request, CompletionBody)
    model = services.check_model(body.model)
    services.check_accepting(body)
    prompts = await services.prompts.completion(body.prompt, body.add_special_tokens is not False)
    params = services.params.for_completion(body)
    reply = _Reply(services, body, model)
    batch = await for_request(request, services.submit(reply.id, body, prompts, params))
    if body.stream:
        return EventStream(reply.stream(batch), batch.close)
    completions = await for_request(request, batch.collect())
    return JsonReply(reply.whole(batch, completions))


class _Reply:
    """Shapes the reply to one request, whole or in chunks."""

    def __init__(self, services: Services, body: CompletionBody, model: str) -> None:
        self.id, self._created = new_id("cmpl"), int(time.time())
        self._tokenizer = services.engine.tokenizer
        self._body, self._model = body, model

    def whole(self, batch: Batch, completions: Sequence[Completion]) -> JsonObject:
        """Returns the body of a reply that is not streamed."""
        choices = []
        for index, (job, done) in enumerate(zip(batch.jobs, completions, strict=True)):
            echo = self._echo(job)
            choice = self._choice(index, echo + done.text, _reason(done), done.stop_reason)
            logprobs = self._logprobs(job)
            entries = [*self._echoed(done.prompt_logprobs), *(done.logprobs or ())]
            choice["logprobs"] = logprobs.take(entries) if logprobs else None
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, done.prompt_logprobs or ()
                )
            if self._body.return_token_ids:
                choice["token_ids"] = done.token_ids
                choice["prompt_token_ids"] = job.prompt.token_ids
            choices.append(choice)
        return {**self._envelope(choices), "usage": batch.usage.to_json()}

    async def stream(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """Yields the events of a streamed reply."""
        logprobs = [self._logprobs(job) for job in batch.jobs]
        started: set[int] = set()
        async with aclosing(batch.outputs()) as outputs:
            async for index, output in outputs:
                first = index not in started
                started.add(index)
                choice = self._chunk(index, batch.jobs[index], output, logprobs[index], first)
                if choice is not None:
                    yield event(self._stream_envelope([choice]))
        if self._body.include_usage:
            yield event({**self._envelope([]), "usage": batch.usage.to_json()})

    def _chunk(
        self,
        index: int,
        job: Job,
        output: RequestOutput,
        logprobs: CompletionLogprobs | None,
        first: bool,
    ) -> JsonObject | None:
        """Returns the choice of one chunk, or None when there is nothing to say yet."""
        text = self._echo(job) + output.text if first else output.text
        entries = [*self._echoed(output.prompt_logprobs), *(output.logprobs or ())]
        speaks = text or entries or output.finished or self._body.return_token_ids
        if not speaks:
            return None
        choice = self._choice(index, text, _reason(output), output.stop_reason)
        choice["logprobs"] = logprobs.take(entries) if logprobs else None
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if first:
                choice["prompt_token_ids"] = job.prompt.token_ids
        return choice

    def _echo(self, job: Job) -> str:
        if not self._body.echo:
            return ""
        if job.prompt.text is not None:
            return job.prompt.text
        skip = self._body.skip_special_tokens is not False
        return self._tokenizer.decode(job.prompt.token_ids, skip_special_tokens=skip)

    def _echoed(self, entries: Sequence[TokenLogprobs] | None) -> Sequence[TokenLogprobs]:
        return (entries or ()) if self._body.echo and self._body.logprobs is not None else ()

    def _logprobs(self, job: Job) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        skip = self._body.skip_special_tokens is not False
        context = [] if self._body.echo else job.prompt.token_ids
        return CompletionLogprobs(self._tokenizer, context, skip)

    def _choice(
        self, index: int, text: str, reason: str | None, stop_reason: str | int | None
    ) -> JsonObject:
        return {"index": index, "text": text, "finish_reason": reason, "stop_reason": stop_reason}

    def _envelope(self, choices: list[JsonObject]) -> JsonObject:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _stream_envelope(self, choices: list[JsonObject]) -> JsonObject:
        envelope = self._envelope(choices)
        return {**envelope, "usage": None} if self._body.include_usage else envelope


def _reason(output: RequestOutput | Completion) -> str | None:
    return None if output.finish_reason is None else output.finish_reason.value
