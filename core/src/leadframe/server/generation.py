"""Runs the choices of one HTTP request side by side, and ends all of them together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from leadframe.engine.outputs import Completion, RequestOutput
from leadframe.request import FinishReason
from leadframe.sampling_params import SamplingParams
from leadframe.server.engine_client import EngineClient, RequestStream
from leadframe.server.prompts import ReadPrompt
from leadframe.server.replies import HttpError, scrubbed

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)
_SUBMITTED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One choice.

    Attributes:
      request_id: unique in the engine.
      prompt: what to go on from; choices of one prompt share it.
      params: how to sample.
    """

    request_id: str
    prompt: ReadPrompt
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: each prompt counts once, however many choices it has."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: dict[int, int] = field(default_factory=dict)

    def take(self, index: int, job: Job, output: RequestOutput) -> None:
        """Updates the counts of a choice."""
        key = id(job.prompt)
        self.prompt[key] = len(job.prompt.token_ids)
        self.cached[key] = max(self.cached.get(key, 0), output.num_cached_tokens)
        self.completion[index] = output.num_output_tokens

    def to_json(self) -> dict[str, object]:
        """Returns OpenAI's usage object."""
        prompt, completion = sum(self.prompt.values()), sum(self.completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Batch:
    """The choices of one HTTP request, all accepted by the engine.

    Closing it aborts what has not finished.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        streams: Sequence[RequestStream],
        on_close: Callable[[Batch], None],
    ) -> None:
        self.jobs, self._streams, self._on_close = jobs, streams, on_close
        self.usage = Usage()

    @classmethod
    async def submit(
        cls, engine: EngineClient, jobs: Sequence[Job], on_close: Callable[[Batch], None]
    ) -> Batch:
        """Queues all choices, or none. `on_close` is called whenever the batch is closed.

        Raises:
          RequestError: the engine refuses one of them.
          EngineDead: the engine stopped.
        """
        accepted: dict[int, RequestStream] = {}

        async def submit_one(index: int, job: Job) -> None:
            accepted[index] = await engine.submit(
                job.request_id,
                job.prompt.token_ids,
                job.params,
                priority=job.priority,
                cache_salt=job.cache_salt,
            )

        tasks: list[asyncio.Task[None]] = []
        try:
            for index, job in enumerate(jobs):
                tasks.append(asyncio.ensure_future(submit_one(index, job)))
                if len(tasks) % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a thousand in one turn would hold up the event loop
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in accepted.values():
                stream.close()
            raise
        finally:
            tasks.clear()  # an error refers to this frame, and the tasks to all their errors
        return cls(jobs, [accepted[index] for index in range(len(jobs))], on_close)

    def close(self) -> None:
        """Aborts what has not finished; harmless when repeated."""
        for stream in self._streams:
            stream.close()
        self._on_close(self)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields (choice, output) as they come, until every choice has finished.

        What a choice produced before it failed is yielded before the error is raised.

        Raises:
          HttpError: a choice failed in the engine.
          EngineDead: the engine stopped.
        """
        async with aclosing(_interleave(self._streams)) as outputs:
            async for index, output in outputs:
                self.usage.take(index, self.jobs[index], output)
                if output.finish_reason in _FAILED:
                    if output.text or output.token_ids:
                        yield index, dataclasses.replace(output, finish_reason=None)
                    raise _failure(output)
                yield index, output

    async def collect(self) -> list[Completion]:
        """Waits for every choice and returns them in order; aborts all if one fails."""
        results = [
            Completion(job.request_id, job.prompt.token_ids, job.prompt.text) for job in self.jobs
        ]
        try:
            async with aclosing(self.outputs()) as outputs:
                async for index, output in outputs:
                    results[index].add(output)
        finally:
            self.close()
        return results


def _failure(output: RequestOutput) -> HttpError:
    if output.finish_reason is FinishReason.ABORT:
        return HttpError(503, "the request was aborted, for the server is going down")
    reason = scrubbed(output.error or "no reason is known")
    return HttpError(500, f"generation failed: {reason}", code="generation_failed")


async def _interleave(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Merges streams. A slow consumer blocks the pumps, and the engine merges what waits."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    mailbox: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await mailbox.put((index, output))
        except Exception as error:
            await mailbox.put((index, error))

    pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            index, item = await mailbox.get()
            if isinstance(item, Exception):
                raise item
            yield index, item
            running -= item.finished
    finally:
        for task in pumps:
            task.cancel()
