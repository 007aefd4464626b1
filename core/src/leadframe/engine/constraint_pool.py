"""Compiles the constraints of requests away from the event loop and from the engine's thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from leadframe.engine.futures import run_into
from leadframe.errors import EngineDead, QueueFull
from leadframe.grammar import GrammarCompiler, GrammarConstraint
from leadframe.sampling_params import SamplingParams

_SECONDS: Final = 10.0
_MAX_WAITING: Final = 256


class _Job:
    """One constraint to make. Either it is begun or its request gives up, never both."""

    def __init__(self, make: Callable[[], GrammarConstraint]) -> None:
        self.make = make
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[GrammarConstraint] = self.loop.create_future()
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Says whether the caller is the first to ask."""
        return self._claim.acquire(blocking=False)


class ConstraintPool:
    """A thread that compiles, one constraint after the other, and the queue in front of it.

    Once begun, a constraint takes as long as the compiler lets it: 2 seconds of work, or 10 in all,
    in the process that compiles first, then about one here. The thread is a daemon: it keeps no
    process alive.

    Args:
      compiler: what compiles; `close` closes it.
      seconds: most time that a request waits for its turn.
    """

    def __init__(self, compiler: GrammarCompiler, seconds: float = _SECONDS) -> None:
        self._compiler, self._seconds = compiler, seconds
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MAX_WAITING)
        self._closed = False
        self._thread: threading.Thread | None = None

    async def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """Returns what binds the tokens of a request; None where nothing does.

        Raises:
          RequestError: the constraint cannot be used.
          QueueFull: those of others take all the time.
          EngineDead: the pool is closed.
        """
        wanted = params.wanted
        if wanted is None:
            return None
        known = self._compiler.known(wanted, ignore_eos=params.ignore_eos)
        if known is not None:
            return known
        job = _Job(partial(self._compiler.compile, wanted, ignore_eos=params.ignore_eos))
        self._put(job)
        try:
            await asyncio.wait([job.future], timeout=self._seconds)
            if not job.future.done() and job.claim():
                raise _busy(f"this one waited {self._seconds:g} s")
            return await job.future
        finally:
            job.claim()
            job.future.cancel()

    def close(self) -> None:
        """Ends what is being compiled and refuses what waits; callable more than once."""
        self._closed = True
        self._compiler.close()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                run_into(job.loop, job.future, _refuse)
        self._jobs.put(None)

    def _put(self, job: _Job) -> None:
        if self._closed:
            _refuse()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise _busy(f"{_MAX_WAITING} wait already") from None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="leadframe-grammar", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.claim():
                run_into(job.loop, job.future, job.make)
            del job


def _busy(why: str) -> QueueFull:
    return QueueFull(f"too many new constraints are being compiled: {why}; try again later")


def _refuse() -> GrammarConstraint:
    raise EngineDead("the engine is shutting down")
