"""The process that compiles grammars first. It may die of one.

Run as a module with the number of an inherited socket: the vocabulary comes, then grammars.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from leadframe.channel import Channel, Message
from leadframe.grammar.matcher import STACK_BYTES, new_matcher, on_deep_stack
from leadframe.grammar.vocabulary import TokenTable, build_tokens

_MEMORY_BYTES: Final = 1 << 30
"""What it may take beyond what it takes with the vocabulary, and two deep stacks: that of the last
grammar may be there for a moment yet."""
_WORN_BYTES: Final = _MEMORY_BYTES // 2 + 2 * STACK_BYTES
"""What is left of a grammar must not count against the next one."""
_CPU_SECONDS: Final = 2.0
"""The kernel ends a compilation after so much work, whoever waits for it or not."""


def main() -> None:
    """Compiles what comes until the connection ends; the argument is its number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    tokens = build_tokens(TokenTable.from_arrays(inbox.get().arrays))
    start_bytes = _limit_memory()
    channel.send("ready")
    while True:
        grammar = inbox.get().fields["grammar"]
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
        reply = _try(tokens, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply["is_worn"] = _memory()[0] - start_bytes > _WORN_BYTES
        channel.send("tried", reply)


def _listen(channel: Channel, inbox: queue.SimpleQueue[Message]) -> None:
    """Receives, and ends the process with the connection, also during a compilation."""
    while (message := channel.receive()) is not None:
        inbox.put(message)
    os._exit(0)


def _try(tokens: Any, grammar: str) -> dict[str, Any]:
    """Does what the other process would do: compiles, and computes the first mask."""
    before, started = _memory()[1], time.process_time()
    matcher = on_deep_stack(lambda: new_matcher(tokens, grammar))
    error = matcher.get_error()
    if not error:
        matcher.deep_copy().compute_bitmask()
    seconds = time.process_time() - started
    return {"error": error, "seconds": seconds, "bytes": _memory()[1] - before}


def _limit_memory() -> int:
    """Limits what may be taken from now on, and returns what is taken: bytes of addresses."""
    now = _memory()[0]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if now:
        limit = now + _MEMORY_BYTES + 2 * STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return now


def _memory() -> tuple[int, int]:
    """Returns bytes of addresses and of memory of this process; zeros where nothing says so."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
