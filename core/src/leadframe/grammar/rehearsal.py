"""Grammars are compiled in another process first, because some end the process that does it.

llguidance overflows its stack on some numbers, and has no limit for the work on some regexes.
What ends the other process, or takes too long there, is never compiled in this one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from leadframe.channel import Channel, Message, start_process
from leadframe.errors import EngineDead, InternalError
from leadframe.grammar.vocabulary import TokenTable

logger = logging.getLogger(__name__)

_WORKER: Final = "leadframe.grammar.rehearsal_worker"
_SECONDS: Final = 10.0
"""Wall time of one rehearsal; then its process is ended."""
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0
_MAX_CPU_SECONDS: Final = 1.0
"""What compiles here takes as long again, and once more when its lexer is full."""
_MAX_KEPT_BYTES: Final = 64 << 20
"""What a compiled grammar may hold on to; 32 of them are remembered."""
_MAX_REFUSED: Final = 256
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each reserves addresses, which are limited
}


class Rehearsal:
    """Compiles grammars in a process of its own, which starts with the first one.

    Safe to use from several threads; they take turns.

    Args:
      table: called once for each process, for the vocabulary.
      seconds: wall time that one grammar may take.
    """

    def __init__(self, table: Callable[[], TokenTable], seconds: float = _SECONDS) -> None:
        self._table, self._seconds = table, seconds
        self._turn = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def problem(self, grammar: str) -> str | None:
        """Says why a Lark grammar must not be compiled in this process; None where it may.

        Raises:
          EngineDead: `close` was called, before or meanwhile.
          InternalError: the other process does not start.
        """
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._turn:
            if key in self._refused:
                return self._refused[key]
            started = time.monotonic()
            reply = self._ask(grammar)
            seconds = time.monotonic() - started
            problem = self._loss(seconds) if reply is None else _judge(reply)
            if reply is None or (problem and not reply.fields["error"]):
                self._refused[key] = str(problem)
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
            if reply is None or reply.fields["is_worn"]:
                self._retire()
            return problem

    def close(self) -> None:
        """Ends the other process, whatever it does, and every rehearsal that waits."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.end()

    def _ask(self, grammar: str) -> Message | None:
        if self._worker is not None and self._worker.process.poll() is not None:
            self._retire()  # it was ended from outside, between two rehearsals
        if self._worker is None and not self._closed:
            self._worker = _Worker(self._table())
        worker = self._worker
        if worker is None or self._closed:
            self.close()
            raise EngineDead("the engine is shutting down")
        reply = worker.ask("try", {"grammar": grammar}, self._seconds)
        if self._closed:
            raise EngineDead("the engine is shutting down")
        return reply

    def _loss(self, seconds: float) -> str:
        """Says why no reply came: too late, or the connection ended with the process."""
        if seconds >= self._seconds or self._was_stopped():
            seconds = min(seconds, self._seconds)
            problem = f"it was not compiled in {seconds:.1f} s; give a simpler one"
        else:
            problem = "it takes more memory or recursion to compile than there is"
        logger.warning("a grammar was refused: %s", problem)
        return problem

    def _was_stopped(self) -> bool:
        """Whether the kernel ended the process for its work; its end may take a moment to show."""
        if self._worker is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            return self._worker.process.wait(_END_SECONDS) == -signal.SIGPROF
        return False

    def _retire(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class _Worker:
    """The other process. It ends with this one: its connection does.

    Attributes:
      process: it.
      end: ends it at once; also called when this object goes.
    """

    def __init__(self, table: TokenTable) -> None:
        self.process, ours = start_process(_WORKER, env={**os.environ, **_ENVIRONMENT})
        self._socket, self._channel = ours, Channel(ours)
        self.end = weakref.finalize(self, _end, self.process, self._channel)
        if self.ask("tokens", {}, _START_SECONDS, table) is None:
            self.end()
            raise InternalError(
                "the process that compiles grammars first did not start: "
                f"status {self.process.returncode}"
            )

    def ask(
        self, op: str, fields: dict[str, str], seconds: float, table: TokenTable | None = None
    ) -> Message | None:
        """Sends something and returns the reply; None where none came in time."""
        self._socket.settimeout(seconds)
        try:
            self._channel.send(op, fields, () if table is None else table.arrays())
        except OSError:
            return None
        return self._channel.receive()


def _judge(reply: Message) -> str | None:
    """Says what is wrong with a grammar that compiled, or failed to, in the other process."""
    fields = reply.fields
    if fields["error"]:
        return str(fields["error"])
    if fields["seconds"] > _MAX_CPU_SECONDS:
        return (
            f"it takes {fields['seconds']:.1f} s to compile, of at most {_MAX_CPU_SECONDS:g}; "
            "give a simpler one"
        )
    if fields["bytes"] > _MAX_KEPT_BYTES:
        return (
            f"it takes {fields['bytes'] >> 20} MiB when compiled, of at most "
            f"{_MAX_KEPT_BYTES >> 20}; give a simpler one"
        )
    return None


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    process.kill()
    process.wait()
    channel.close()
