"""Compiles the constraints of requests away from the event loop and from the engine's thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from leadframe.errors import EngineDead, RequestError
from leadframe.grammar import GrammarCompiler, GrammarConstraint
from leadframe.sampling_params import SamplingParams

_THREADS = 2
_SECONDS = 10.0
"""The library's own limits end a compilation in a fraction of it; the rest is time in the queue."""


class ConstraintPool:
    """A few threads that compile.

    Args:
      compiler: what they share.
      seconds: most time that a request waits for its constraint.
    """

    def __init__(self, compiler: GrammarCompiler, seconds: float = _SECONDS) -> None:
        self._compiler, self._seconds = compiler, seconds
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="leadframe-grammar")

    async def constraint(self, params: SamplingParams) -> GrammarConstraint | None:
        """Returns what binds the tokens of a request; None where nothing does.

        Raises:
          RequestError: the constraint cannot be used, or took too long.
          EngineDead: the pool is closed.
        """
        wanted = params.wanted
        if wanted is None:
            return None
        known = self._compiler.known(wanted, ignore_eos=params.ignore_eos)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        compile_it = partial(self._compiler.compile, wanted, ignore_eos=params.ignore_eos)
        try:
            work = loop.run_in_executor(self._pool, compile_it)
        except RuntimeError as error:  # closed
            raise EngineDead("the engine is shutting down") from error
        try:
            return await asyncio.wait_for(work, self._seconds)
        except TimeoutError:
            raise RequestError(
                f"{wanted.param} was not compiled in {self._seconds:g} s; give a simpler one",
                param=wanted.param,
            ) from None

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
