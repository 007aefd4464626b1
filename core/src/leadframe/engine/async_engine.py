"""The engine in a thread of its own, with an asyncio face.

Commands go in through a queue that the engine drains between steps; outputs come back once a
step, through one wake-up of the event loop. A reader that is slow gets fewer, larger outputs:
what waits for it is merged, so that it holds at most one output of one request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from leadframe.config import EngineConfig
from leadframe.engine.constraint_pool import ConstraintPool
from leadframe.engine.core import Engine
from leadframe.engine.futures import run_into
from leadframe.engine.outputs import EngineHealth, RequestOutput
from leadframe.errors import DeviceLost, EngineDead, LeadframeError
from leadframe.sampling_params import SamplingParams

_STALL_SECONDS = 60.0
"""A step that takes longer than this means that nothing moves."""


def merge(old: RequestOutput | None, new: RequestOutput) -> RequestOutput:
    """Joins two successive outputs of one request."""
    if old is None:
        return new
    logprobs = new.logprobs
    if old.logprobs is not None:
        logprobs = old.logprobs + (new.logprobs or ())
    return dataclasses.replace(
        new,
        token_ids=old.token_ids + new.token_ids,
        text=old.text + new.text,
        logprobs=logprobs,
        prompt_logprobs=old.prompt_logprobs or new.prompt_logprobs,
    )


class RequestStream:
    """The outputs of one request: a mailbox with at most one merged output.

    Lives on the event loop. Iterate over it once; `close` it however the iteration ends.
    """

    def __init__(self, on_close: Callable[[bool], None]) -> None:
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self._on_close = on_close
        self._finished = self._closed = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished or self._closed:
            raise StopAsyncIteration
        output = await self.get()
        if output.finished:
            self._finished = True
            self.close()
        return output

    def close(self) -> None:
        """Aborts the request unless it has finished. Never blocks; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._on_close(self._finished)

    def put(self, output: RequestOutput) -> None:
        """Adds an output to what waits for the reader."""
        self._pending = merge(self._pending, output)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """Makes the reader raise an error, after what still waits for it."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Waits for something new and takes all of it."""
        await self._ready.wait()
        self._ready.clear()
        output, self._pending = self._pending, None
        if output is not None:
            if self._error is not None:
                self._ready.set()
            return output
        raise self._error or EngineDead("the engine has stopped")


class AsyncEngine:
    """Serves many asyncio tasks from one engine.

    Args:
      engine: built and idle; this object drives it from now on.
      on_death: called once, in the engine's thread, when the engine stops by an error.
    """

    def __init__(
        self, engine: Engine, *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self.engine = engine
        self.on_death = on_death
        self._constraints = ConstraintPool(engine.grammars)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: BaseException | None = None
        self._stopping = False
        self._last_progress = time.monotonic()
        engine.on_device_lost(self._note_loss)
        self._thread = threading.Thread(target=self._run, name="leadframe-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: EngineConfig, **kwargs: Any) -> AsyncEngine:
        """Builds the engine and starts its thread; takes what `Engine.from_config` takes."""
        return cls(Engine.from_config(config, **kwargs))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.engine.tokenizer

    @property
    def model_info(self) -> Any:
        """Static facts about the model."""
        return self.engine.model_info

    @property
    def model_name(self) -> str:
        """The name that the API shows."""
        return self.engine.model_name

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, after fitting it to the KV cache."""
        return self.engine.max_model_len

    @property
    def metrics(self) -> Any:
        """The engine's metrics."""
        return self.engine.metrics

    @property
    def ledger(self) -> Any:
        """Where start-up time and memory went."""
        return self.engine.ledger

    @property
    def device_summary(self) -> str:
        """One line that names the platform and the device."""
        return self.engine.device_summary

    @property
    def capacity_line(self) -> str:
        """The KV capacity, as printed at start-up."""
        return self.engine.capacity_line

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Runs one request and yields its outputs; leaving the loop early aborts it.

        Raises:
          RequestError: the request cannot be served; nothing was queued.
          EngineDead: the engine stopped.
        """
        stream = await self.submit(
            request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Queues one request and returns its outputs to come, before there is a first one.

        Raises:
          RequestError: the request cannot be served; nothing was queued.
          EngineDead: the engine stopped.
        """
        self._loop = asyncio.get_running_loop()
        if request_id in self._streams:
            raise LeadframeError(f"request id {request_id!r} is in use")

        def on_close(finished: bool) -> None:
            self._streams.pop(request_id, None)
            if not finished:
                self._post(lambda: self._abort(request_id))

        stream = self._streams[request_id] = RequestStream(on_close)
        try:
            constraint = await self._constraints.constraint(params)
            await self._call(
                lambda: self.engine.add_request(
                    request_id,
                    prompt_token_ids,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    constraint=constraint,
                )
            )
        except BaseException:
            stream.close()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        """Ends a request; unknown or finished ids are ignored."""
        await self._call(lambda: self._abort(request_id))

    async def run_in_engine(self, fn: Callable[[], Any]) -> Any:
        """Runs a function between two steps, in the engine's thread, and returns its result."""
        self._loop = asyncio.get_running_loop()
        return await self._call(fn)

    def health(self) -> EngineHealth:
        """Says whether the engine is alive and moving; cheap, callable from any thread."""
        running, waiting = self.engine.num_running, self.engine.num_waiting
        since = time.monotonic() - self._last_progress if running or waiting else 0.0
        reason = ""
        if self._death is not None:
            reason = f"the engine stopped: {type(self._death).__name__}: {self._death}"
        elif since > _STALL_SECONDS:
            reason = f"no step has ended for {since:.0f} s with {running} running"
        return EngineHealth(
            ready=self._death is None and not self._stopping,
            alive=not reason,
            running=running,
            waiting=waiting,
            seconds_since_progress=since,
            reason=reason,
        )

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Lets live requests finish for a while, aborts the rest and stops the thread."""
        deadline = time.monotonic() + drain_seconds
        while self._streams and time.monotonic() < deadline and self._death is None:
            await asyncio.sleep(0.02)
        self._stopping = True
        self._constraints.close()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 10.0)

    # --- between the two threads --------------------------------------------------------

    async def _call(self, fn: Callable[[], Any]) -> Any:
        self._raise_if_dead()
        if self._stopping:
            raise EngineDead("the engine is shutting down")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._post(partial(run_into, loop, future, fn))
        try:
            # The engine may have died after the first check and never look at its queue again.
            self._raise_if_dead()
            return await future
        finally:
            del future  # see `run_into`

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDead(f"the engine stopped: {self._death}") from self._death

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def _note_loss(self, loss: DeviceLost) -> None:
        """Wakes the engine's thread, which may wait for commands, so that it ends."""

        def fail() -> None:
            if self._death is None:
                raise loss

        self._post(fail)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        self._deliver(self.engine.settle() + ([] if output is None else [output]))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        loop = self._loop
        if outputs and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _fail_all(self, error: BaseException) -> None:
        for stream in list(self._streams.values()):
            stream.fail(EngineDead(f"the engine stopped: {error}"))

    # --- the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._drain(block=not self.engine.has_work):
                if self.engine.has_work:
                    self.engine.advance(self._deliver)
                if not self.engine.has_work:
                    self._deliver(self.engine.settle())
                self._last_progress = time.monotonic()
            self._abort_rest()
        except BaseException as error:
            self._die(error)
        finally:
            self.engine.close()

    def _drain(self, *, block: bool) -> bool:
        """Runs waiting commands; returns False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            if block:
                self._last_progress = time.monotonic()
            block = False
            command()

    def _abort_rest(self) -> None:
        aborted = self.engine.abort_all()
        self._deliver(self.engine.settle() + aborted)

    def _die(self, error: BaseException) -> None:
        self._death = error
        with suppress(Exception):  # what was sampled before is still good
            self._deliver(self.engine.settle())
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._fail_all, error)
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            if command is not None:
                command()
        if self.on_death is not None:
            self.on_death(error)


__all__ = ["AsyncEngine", "RequestStream", "merge"]
