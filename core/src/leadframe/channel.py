"""Processes beside this one, and what they say: a JSON header and raw arrays. No pickles."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SIZES: Final = struct.Struct(">II")
"""Bytes of the header and of all arrays, in front of every message."""

Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
      op: what it is about.
      fields: JSON values.
      arrays: views of what was received.
    """

    op: str
    fields: Mapping[str, Any]
    arrays: Arrays = ()


class Channel:
    """One end of a stream socket. One thread sends and one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, op: str, fields: Mapping[str, Any] | None = None, arrays: Arrays = ()) -> None:
        """Sends a message.

        Raises:
          OSError: the other end is gone.
        """
        kinds = [[array.dtype.name, array.shape] for array in arrays]
        header = json.dumps({"op": op, "fields": fields or {}, "arrays": kinds}).encode()
        body = b"".join(array.tobytes() for array in arrays)
        self._sock.sendall(_SIZES.pack(len(header), len(body)) + header + body)

    def receive(self) -> Message | None:
        """Waits for a message; None when the other end is gone."""
        sizes = self._read(_SIZES.size)
        if sizes is None:
            return None
        num_header, num_body = _SIZES.unpack(sizes)
        header, body = self._read(num_header), self._read(num_body)
        if header is None or body is None:
            return None
        message = json.loads(header)
        return Message(message["op"], message["fields"], _arrays(message["arrays"], body))

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                count = self._sock.recv_into(view[done:])
            except OSError:
                count = 0
            if count == 0:
                return None
            done += count
        return data

    def end(self) -> None:
        """Tells the other end that nothing more will come."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # it has gone already
            return

    def close(self) -> None:
        """Closes this end."""
        self._sock.close()


def start_process(
    module: str, *arguments: str, env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a module of this project; its first argument is the number of its end of a connection.

    It is out of reach of the terminal's Ctrl-C: this process decides when it ends. -P keeps the
    current directory off the module path.

    Args:
      module: its name.
      arguments: what follows the number.
      env: its environment; None is this process's.

    Returns:
      The process, and our end.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to this process
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=None if env is None else dict(env),
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def _arrays(kinds: Sequence[tuple[str, Sequence[int]]], body: bytearray) -> list[npt.NDArray[Any]]:
    arrays, start = [], 0
    for name, shape in kinds:
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return arrays
