"""The ranks of a tensor-parallel group under test.

Where a backend serves one device each, every rank is a process of its own, so that one that hangs
is a failed case and not a hung kit. Where one backend drives all devices, it runs in this process:
such devices may be open only once.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy.typing as npt

from leadframe.channel import Channel, Message, start_process
from leadframe.conformance.case import ConformanceFailure
from leadframe.conformance.kit import Kit
from leadframe.conformance.loading import open_again
from leadframe.conformance.open_kit import LIMITS

_MOST: Final = 3
"""Two ranks cannot tell one order of adding from another: a + b is b + a."""
_SECONDS = 300.0
"""How long ranks may take for one thing; interpreted kernels are slow."""
_CLOSE_SECONDS: Final = 20.0
_END_SECONDS = 2.0

Reply = Mapping[str, npt.NDArray[Any]]


def no_ranks(kit: Kit) -> str | None:
    """Why there is no group of ranks to test; None when there is one."""
    caps = kit.backend.caps
    if caps.tensor_parallel < 2:
        if caps.rank_processes:
            return "tensor_parallel is 1: there is no room here for a second rank"
        return "tensor_parallel is 1: several devices for one model are not claimed"
    return None if kit.probe_args else "this backend was not loaded from a plugin"


def no_processes(kit: Kit) -> str | None:
    """The same for what only ranks that are processes show."""
    if kit.backend.caps.rank_processes:
        return no_ranks(kit)
    return "rank_processes is not claimed"


def group_of(kit: Kit) -> Ranks:
    """Returns the kit's group, and starts one when there is none that works."""
    if kit.ranks is None or not kit.ranks.works:
        count = min(_MOST, kit.backend.caps.tensor_parallel)
        kind = ProcessRanks if kit.backend.caps.rank_processes else OwnRanks
        kit.ranks = kind(kit, count)
    kit.metrics["ranks"] = kit.ranks.count
    return kit.ranks


class Ranks(Protocol):
    """A group.

    Attributes:
      count: ranks in it.
      works: whether it can still be asked.
    """

    count: int
    works: bool

    def ask(self, program: str, fields: Mapping[str, Any], arrays: Reply) -> list[Reply]:
        """Runs a program of `rank_programs` on every rank; returns what each answers."""

    def close(self) -> None:
        """Ends the group."""


class OwnRanks:
    """All ranks through one backend: there is one answer.

    Args:
      kit: the kit.
      count: ranks.
    """

    def __init__(self, kit: Kit, count: int) -> None:
        self.count, self.works = count, True
        limits = replace(LIMITS, tensor_parallel_size=count)
        selection, backend = open_again(kit.probe_args, limits)
        self._kit = Kit(open=lambda: backend, device=kit.device, kernels=selection.kernels())

    def ask(self, program: str, fields: Mapping[str, Any], arrays: Reply) -> list[Reply]:
        """Runs a program."""
        from leadframe.conformance.rank_programs import PROGRAMS

        return [PROGRAMS[program](self._kit, {**fields, "count": self.count}, arrays)]

    def close(self) -> None:
        """Closes the backend."""
        self.works = False
        self._kit.backend.close()


class Process:
    """A process of the kit's own, which ends when this end of its channel is closed."""

    def __init__(self) -> None:
        self._process, self.socket = start_process("leadframe.conformance.rank_worker")
        self.channel = Channel(self.socket)

    def tell(self, op: str, fields: Mapping[str, Any], arrays: Reply | None = None) -> None:
        """Says what to do.

        Raises:
          ConformanceFailure: it has ended.
        """
        try:
            self.channel.send(op, fields, list((arrays or {}).values()))
        except OSError as error:
            raise ConformanceFailure(f"{op}: a rank has ended") from error

    def close(self) -> None:
        """Ends it, by force when it does not end by itself."""
        self.channel.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ProcessRanks:
    """A process for every rank.

    Args:
      kit: the kit.
      count: ranks.

    Raises:
      ConformanceFailure: a rank could not be created.
    """

    def __init__(self, kit: Kit, count: int) -> None:
        self.count, self.works = count, True
        name = f"leadframe-ranks-{secrets.token_hex(16)}"
        self._folder = str(Path(tempfile.gettempdir(), name))
        self._ranks: list[Process] = []
        try:
            self._ranks += [Process() for _ in range(count)]
            self._create(kit)
        except BaseException:
            self.close()
            raise

    def _create(self, kit: Kit) -> None:
        """As the core does: rank 0 before the others, and before there is anywhere to meet."""
        self._create_ranks(kit, [0])
        os.mkdir(self._folder, 0o700)
        self._create_ranks(kit, range(1, self.count))

    def _create_ranks(self, kit: Kit, ranks: Sequence[int]) -> None:
        shared = replace(LIMITS, tensor_parallel_size=self.count, rendezvous=self._folder)
        for rank in ranks:
            limits = asdict(replace(shared, rank=rank))
            fields = {"args": kit.probe_args, "device": kit.device, "limits": limits}
            self._ranks[rank].tell("create", fields)
        for rank, message in collect(self._ranks, ranks, "platform_create").items():
            said = message.fields["tensor_parallel"]
            if said < self.count or not message.fields["processes"]:
                raise ConformanceFailure(
                    f"rank {rank} of {self.count} says that tensor_parallel is {said} and "
                    f"rank_processes {message.fields['processes']}"
                )

    def ask(self, program: str, fields: Mapping[str, Any], arrays: Reply) -> list[Reply]:
        """Runs a program on every rank.

        Raises:
          ConformanceFailure: a rank failed, ended or hangs; the group is ended.
        """
        said = {**fields, "names": list(arrays), "count": self.count}
        try:
            for process in self._ranks:
                process.tell(program, said, arrays)
            replies = collect(self._ranks, range(self.count), program)
        except BaseException:
            self.close()
            raise
        return [dict(zip(m.fields["names"], m.arrays, strict=True)) for m in replies.values()]

    def leave(self) -> None:
        """Closes one rank's backend after the other, and then the group.

        Raises:
          ConformanceFailure: a rank does not close.
        """
        try:
            for rank, process in enumerate(self._ranks):
                process.tell("close", {})
                collect(self._ranks, [rank], "close", _CLOSE_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        """Ends every process."""
        self.works = False
        for process in self._ranks:
            process.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def collect(
    processes: Sequence[Process],
    ranks: Sequence[int],
    what: str,
    seconds: float | None = None,
) -> dict[int, Message]:
    """Waits for one reply of each of some processes; returns them in the order of `ranks`.

    Raises:
      ConformanceFailure: one failed, ended, or did not answer in time.
    """
    seconds = _SECONDS if seconds is None else seconds
    end, waiting = time.monotonic() + seconds, {rank: processes[rank] for rank in ranks}
    replies: dict[int, Message] = {}
    while waiting:
        left = max(0.0, end - time.monotonic())
        ready, _, _ = select.select([p.socket for p in waiting.values()], [], [], left)
        if not ready:
            late = ", ".join(str(rank) for rank in waiting)
            raise ConformanceFailure(f"{what}: no answer of rank {late} within {seconds:g} s")
        for rank in [r for r, p in waiting.items() if p.socket in ready]:
            replies[rank] = _reply(waiting.pop(rank), rank, what)
    return {rank: replies[rank] for rank in ranks}


def _reply(process: Process, rank: int, what: str) -> Message:
    message = process.channel.receive()
    if message is None:
        raise ConformanceFailure(f"{what}: rank {rank} ended without an answer")
    if message.op == "error":
        raise ConformanceFailure(f"{what}: rank {rank}: {message.fields['text']}")
    return message
