"""The process of one rank under test: runs the kit's programs until the kit is gone.

Run as a module with the number of an inherited socket. A thread reads it all the time, so that the
process ends with the kit even from inside a call that waits for another rank.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from leadframe.channel import Arrays, Channel, Message
from leadframe.conformance.execute import describe
from leadframe.conformance.kit import Kit
from leadframe.conformance.loading import open_again
from leadframe.conformance.rank_programs import PROGRAMS
from leadframe.platform import Limits

Messages = queue.SimpleQueue[Message]
Reply = tuple[Mapping[str, Any], Arrays]


def _listen(channel: Channel, messages: Messages) -> None:
    """Receives until the kit is gone, and then ends the process, whatever it does."""
    rendezvous = ""
    while (message := channel.receive()) is not None:
        rendezvous = message.fields.get("limits", {}).get("rendezvous", rendezvous)
        messages.put(message)
    if rendezvous:  # the kit may have been ended before it could
        shutil.rmtree(rendezvous, ignore_errors=True)
    os._exit(0)


class _Rank:
    """This rank: nothing until "create" has come."""

    kit: Kit

    def answer(self, message: Message) -> Reply:
        """Does what a message says."""
        if message.op == "create":
            return self._create(message.fields)
        if message.op == "close":
            self.kit.backend.close()
            return {}, ()
        if message.op == "engine":
            return _engine(message.fields)
        return self._program(message)

    def _create(self, fields: Mapping[str, Any]) -> Reply:
        selection, backend = open_again(fields["args"], Limits(**fields["limits"]))
        self.kit = Kit(open=lambda: backend, device=fields["device"], kernels=selection.kernels())
        caps = backend.caps
        return {"tensor_parallel": caps.tensor_parallel, "processes": caps.rank_processes}, ()

    def _program(self, message: Message) -> Reply:
        names = message.fields["names"]
        given = dict(zip(names, message.arrays, strict=True))
        made = PROGRAMS[message.op](self.kit, message.fields, given)
        return {"names": list(made)}, [np.asarray(value) for value in made.values()]


def _engine(fields: Mapping[str, Any]) -> Reply:
    """Runs an engine that starts ranks of its own; they end with it."""
    from leadframe.conformance.groups.e_serving import Settings, run_engine

    settings = Settings(**fields["settings"])
    return {"tokens": run_engine(settings, fields["head_dim"], fields["seed"])}, ()


def main() -> None:
    """Runs one rank; the argument is the number of its socket."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, messages), daemon=True).start()
    rank = _Rank()
    while True:
        message = messages.get()
        try:
            fields, arrays = rank.answer(message)
        except Exception as error:
            channel.send("error", {"text": describe(error)})
        else:
            channel.send("done", fields, arrays)


if __name__ == "__main__":
    main()
