"""The process of one rank but the first: does what rank 0 tells it, until rank 0 is gone.

Run as a module with the number of an inherited socket and the group's directory. Whatever goes
wrong is sent to rank 0; all but an allocation that does not fit ends the process, which rank 0 and,
through the collectives, every other rank notices.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from leadframe.engine.ranks.wire import (
    Arrays,
    Channel,
    Message,
    error_fields,
    read_config,
    read_kv_spec,
)
from leadframe.engine.startup import choose_dtype, make_kv_spec, resolve_ops
from leadframe.errors import DeviceOOM
from leadframe.models import load_weights, open_model
from leadframe.platform.backend import KV, CompiledStep
from leadframe.platform.batch import Bucket, StepBatch
from leadframe.platform.info import Limits
from leadframe.platform.selection import create_backend, select_device
from leadframe.runner.step import ModelStep

logger = logging.getLogger(__name__)

_LEAVE_SECONDS: Final = 5.0
"""How long a call may still take once rank 0 is gone: it may wait for rank 0 for ever."""
_GONE_SECONDS: Final = 0.5
"""How long the end of rank 0 may take to show, after a failure that it may have caused."""

Reply = tuple[Mapping[str, Any], Arrays] | None


class Worker:
    """One rank.

    Args:
      fields: what "create" brings: the settings, the device, the limits.

    Raises:
      LeadframeError: the device cannot be used or the model cannot be opened.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._config = config = read_config(fields["config"])
        limits = Limits(**fields["limits"])
        self._selection = select_device(fields["device"], os.environ)
        self._checkpoint = open_model(
            config.model, impl=config.model_impl, max_model_len=config.max_model_len
        )
        self._backend = create_backend(self._selection, config.device.options, limits)
        self._weights: Mapping[str, Any] = {}
        self._kv: KV = []
        self._steps: dict[int, tuple[Bucket, CompiledStep]] = {}
        self.handlers: Mapping[str, Callable[[Mapping[str, Any], Arrays], Reply]] = {
            "memory": self._memory,
            "load": self._load,
            "kv_alloc": self._kv_alloc,
            "kv_free": self._kv_free,
            "kv_read": self._kv_read,
            "kv_write": self._kv_write,
            "compile": self._compile,
            "run": self._run,
            "close_step": self._close_step,
        }

    def close(self) -> None:
        """Frees the device."""
        for _, step in self._steps.values():
            step.close()
        self._backend.close()

    def _memory(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        return dataclasses.asdict(self._backend.memory()), ()

    def _load(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        backend, checkpoint, config = self._backend, self._checkpoint, self._config
        dtype = choose_dtype(config.dtype, backend, checkpoint)
        self._weights = load_weights(backend, checkpoint, dtype)
        info = checkpoint.model.info
        kv_spec = make_kv_spec(config, backend, info, dtype)
        ops = resolve_ops(config, backend, self._selection, info, kv_spec, dtype)
        self._step = ModelStep(checkpoint.model, ops)
        return {}, ()

    def _kv_alloc(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        self._kv = self._backend.kv_alloc(read_kv_spec(fields["spec"]), fields["blocks"])
        return {}, ()

    def _kv_free(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        if self._kv:
            self._backend.kv_free(self._kv)
            self._kv = []
        return None

    def _kv_read(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        return {}, [self._backend.kv_read(self._kv[fields["layer"]], fields["blocks"])]

    def _kv_write(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        layer = fields["layer"]
        self._kv[layer] = self._backend.kv_write(self._kv[layer], fields["blocks"], arrays[0])
        return None

    def _compile(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        bucket = Bucket(**fields["bucket"])
        step = self._backend.compile(
            self._step, bucket, self._weights, self._kv, capture=fields["capture"]
        )
        self._steps[fields["step"]] = (bucket, step)
        names = ("bytes", "compile_seconds", "capture_seconds")
        return {name: getattr(step, name) for name in names}, ()

    def _run(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        ints, floats = arrays
        bucket, step = self._steps[fields["step"]]
        batch = StepBatch(bucket, ints, floats, *fields["live"])
        _, self._kv = step.run(batch, self._kv)
        return None

    def _close_step(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        _, step = self._steps.pop(fields["step"])
        step.close()
        return None


class Inbox:
    """Messages from rank 0, received in a thread of its own.

    That thread also clears up when rank 0 is gone without a word, whatever the main one is doing,
    and ends the process when that does not notice.

    Args:
      channel: where they come from.
      rendezvous: the group's directory, known before the first message: rank 0 may never send one.

    Attributes:
      ended: nothing more will come, and what rank 0 left behind is gone.
    """

    def __init__(self, channel: Channel, rendezvous: str) -> None:
        self._channel, self._rendezvous = channel, rendezvous
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._receive, name="inbox", daemon=True).start()

    def take(self) -> Message | None:
        """Waits for the next message; None when rank 0 is gone."""
        return self._messages.get()

    def done(self) -> None:
        """Says that the main thread is about to end the process."""
        self._done.set()

    def _receive(self) -> None:
        last = ""
        while (message := self._channel.receive()) is not None:
            last = message.op
            self._messages.put(message)
        if last != "leave":
            # Nobody else will. While rank 0 lives the directory is its own: torch's store waits
            # for minutes for a file that is gone.
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        self.ended.set()
        self._messages.put(None)
        if not self._done.wait(_LEAVE_SECONDS):
            os._exit(1)


def serve(channel: Channel, rendezvous: str) -> int:
    """Follows rank 0 until it says "leave" or is gone.

    Args:
      channel: the connection to it.
      rendezvous: the group's directory, removed here when rank 0 went without a word.

    Returns:
      The exit status: 0 when rank 0 said so, 1 when this rank failed or rank 0 is gone.
    """
    inbox = Inbox(channel, rendezvous)
    first = inbox.take()
    try:
        is_told = first is not None and _follow(first, inbox, channel)
    except OSError:  # rank 0 went while it was being told something
        is_told = False
    if not is_told:
        inbox.ended.wait(_GONE_SECONDS)
    inbox.done()
    return 0 if is_told else 1


def _follow(first: Message, inbox: Inbox, channel: Channel) -> bool:
    """Does what rank 0 says; returns whether it said to leave."""
    worker: Worker | None = None
    message: Message | None = first
    while message is not None and message.op != "leave":
        try:
            if worker is None:
                worker, reply = _create(message)
            else:
                reply = worker.handlers[message.op](message.fields, message.arrays)
        except Exception as error:
            channel.send("error", error_fields(error))
            if not (isinstance(error, DeviceOOM) and message.op == "kv_alloc"):
                logger.debug("%s failed", message.op, exc_info=True)
                return False
        else:
            if reply is not None:
                channel.send("done", *reply)
        message = inbox.take()
    if message is not None and worker is not None:
        worker.close()
    return message is not None


def _create(message: Message) -> tuple[Worker, Reply]:
    fields = message.fields
    logging.basicConfig(
        level=fields["log_level"],
        format=f"%(asctime)s %(levelname).1s rank {fields['limits']['rank']} %(name)s: %(message)s",
    )
    return Worker(fields), ({}, ())


def main() -> None:
    """Runs one rank; the arguments are the number of its socket and the group's directory."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # a supervisor may send them to every process
        signal.signal(stop, signal.SIG_IGN)  # rank 0 decides
    status = serve(Channel(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2])
    sys.stderr.flush()
    os._exit(status)  # nothing of a device may keep a rank that is no longer needed


if __name__ == "__main__":
    main()
