"""The processes of the other ranks: starting them, talking to them, noticing that one is gone."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from leadframe.channel import start_process
from leadframe.engine.ranks.wire import Arrays, Channel, Message, read_error
from leadframe.errors import DeviceLost, DeviceOOM, LeadframeError
from leadframe.models.ranks import heads_per_rank

logger = logging.getLogger(__name__)

_WORKER: Final = "leadframe.engine.ranks.worker"
_CLOSE_SECONDS: Final = 10.0
"""How long a worker may take to end before it is ended."""
_TELL_SECONDS: Final = 2.0
"""How long a rank that failed may take to say so, once rank 0 has failed because of it."""
_HUNG_SECONDS: Final = 20.0
"""How long rank 0 may stay inside a call after a rank was lost: a device may wait for ever."""

OnLost = Callable[[DeviceLost], None]


class _Peer:
    """One worker.

    Attributes:
      rank: which one.
      replies: what it sent; None when it is gone.
      error: what it said that went wrong.
    """

    def __init__(self, rank: int, rendezvous: str, on_gone: Callable[[_Peer], None]) -> None:
        self.rank, self._on_gone = rank, on_gone
        self.replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.error: LeadframeError | None = None
        self.process, ours = start_process(_WORKER, rendezvous)
        self.channel = Channel(ours)
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def _listen(self) -> None:
        while (message := self.channel.receive()) is not None:
            if message.op == "error":
                self.error = read_error(message.fields, str(self))
            self.replies.put(message)
        self.replies.put(None)
        self._on_gone(self)

    def why_gone(self) -> str:
        """Says what became of a worker that is gone."""
        if self.error is not None:
            return f"{self.error} ({type(self.error).__name__})"
        try:
            status = self.process.wait(_TELL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self} closed its connection"
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{self} {how}"

    def close(self) -> None:
        """Waits for the process, and ends it when it does not end."""
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join()
        self.channel.close()


class RankGroup:
    """Every rank but the first.

    Args:
      count: ranks in all, rank 0 included.
      rendezvous: the group's private directory, which is removed at the end.

    Attributes:
      count: ranks in all.
      on_lost: called from another thread when a rank is gone while the group is in use.
    """

    def __init__(self, count: int, rendezvous: str) -> None:
        self.count, self._rendezvous = count, rendezvous
        self.on_lost: OnLost | None = None
        self._closing = self._is_inside = False
        self._lost: _Peer | None = None
        self._is_lost, self._is_noticed = threading.Event(), threading.Event()
        self._peers: list[_Peer] = []
        try:
            for rank in range(1, count):
                self._peers.append(_Peer(rank, rendezvous, self._note_loss))
        except BaseException:
            self.close()
            raise

    # --- talking ------------------------------------------------------------------------

    def send(self, op: str, fields: Mapping[str, Any] | None = None, arrays: Arrays = ()) -> None:
        """Tells every worker to do something; see `leadframe.engine.ranks.worker`.

        Raises:
          DeviceLost: one is gone.
        """
        for peer in self._peers:
            self._send_to(peer, op, fields, arrays)

    def tell(self, op: str, fields: Mapping[str, Any] | None = None) -> None:
        """Like `send`, for what does not matter to a worker that is gone: freeing things."""
        with suppress(DeviceLost):
            self.send(op, fields)

    def send_each(self, op: str, each: Callable[[int], tuple[Mapping[str, Any], Arrays]]) -> None:
        """Like `send`, with fields and arrays for each rank."""
        for peer in self._peers:
            self._send_to(peer, op, *each(peer.rank))

    def _send_to(
        self, peer: _Peer, op: str, fields: Mapping[str, Any] | None, arrays: Arrays
    ) -> None:
        self.check()
        try:
            peer.channel.send(op, fields, arrays)
        except OSError as error:
            raise self.lost(error) from error

    def collect(self) -> list[Message]:
        """Waits for one reply from every worker, in the order of ranks.

        Raises:
          LeadframeError: what a worker failed with; every other reply has been taken too.
          DeviceLost: a worker is gone without a word.
        """
        replies = [peer.replies.get() for peer in self._peers]
        for peer, reply in zip(self._peers, replies, strict=True):
            if reply is not None and reply.op == "error":
                raise read_error(reply.fields, str(peer))
        if None in replies:
            raise self.lost(None)
        return [reply for reply in replies if reply is not None]

    # --- ranks that are gone --------------------------------------------------------------

    def check(self) -> None:
        """Raises DeviceLost when a worker is gone."""
        if self._is_lost.is_set():
            raise self.lost(None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call in which ranks wait for each other: if one fails in it, all are lost.

        Raises:
          DeviceLost: a rank failed, this one or another.
        """
        self.check()
        self._is_inside = True
        try:
            yield
        except DeviceOOM as error:  # nobody may try again alone
            raise self.lost(error) from error
        except LeadframeError as error:
            if self._is_lost.wait(_TELL_SECONDS):
                raise self.lost(error) from error
            raise
        finally:
            self._is_inside = False

    def lost(self, error: BaseException | None) -> DeviceLost:
        """Returns what to raise after a failure: the loss of another rank, if that is behind it.

        Args:
          error: what rank 0 met, which may only be the consequence.
        """
        self._is_lost.wait(_TELL_SECONDS)
        self._is_noticed.set()
        if self._lost is None:
            return DeviceLost(f"rank 0 failed where {self.count} ranks go together: {error}")
        return self._loss(self._lost)

    def _loss(self, peer: _Peer) -> DeviceLost:
        return DeviceLost(f"one of {self.count} ranks is lost: {peer.why_gone()}")

    def _note_loss(self, peer: _Peer) -> None:
        """Runs in the thread of a peer that is gone."""
        if self._closing or self._is_lost.is_set():
            return
        self._lost = peer
        self._is_lost.set()
        loss = self._loss(peer)
        logger.error("%s", loss)
        if self.on_lost is not None:
            self.on_lost(loss)
        if not self._is_noticed.wait(_HUNG_SECONDS) and self._is_inside and not self._closing:
            logger.critical("rank 0 waits on its device for a rank that is gone; ending")
            os._exit(DeviceLost.exit_code)

    def close(self, leave: Callable[[], None] | None = None) -> None:
        """Ends every worker; calling it twice is harmless.

        Args:
          leave: makes rank 0 leave the group, so that no worker waits for it.
        """
        self._closing = True
        self._is_noticed.set()
        for peer in self._peers:
            with suppress(OSError):  # it may be gone
                peer.channel.send("leave")
            peer.channel.end()
        try:
            if leave is not None:
                leave()
        finally:
            for peer in self._peers:
                peer.close()
            self._peers = []
            shutil.rmtree(self._rendezvous, ignore_errors=True)


def head_parts(num_kv_heads: int, count: int) -> Sequence[slice]:
    """Returns which KV heads of a layer each rank holds; several hold one where they are few."""
    size = heads_per_rank(num_kv_heads, count)
    firsts = [rank * num_kv_heads // count for rank in range(count)]
    return [slice(first, first + size) for first in firsts]
