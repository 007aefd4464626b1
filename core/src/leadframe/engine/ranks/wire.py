"""What travels between rank 0 and a worker: a JSON header and raw arrays. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from leadframe import errors
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import InternalError, LeadframeError
from leadframe.platform.backend import KVLayerSpec, KVSpec

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


def _arrays(kinds: Sequence[tuple[str, Sequence[int]]], body: bytearray) -> list[npt.NDArray[Any]]:
    arrays, start = [], 0
    for name, shape in kinds:
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return arrays


# --- values ---------------------------------------------------------------------------------


def config_fields(config: EngineConfig) -> dict[str, Any]:
    """Turns settings into JSON values."""
    fields = dataclasses.asdict(config)
    fields["device"] |= {
        "options": dict(config.device.options),
        "op_order": {op: list(names) for op, names in config.device.op_order.items()},
    }
    return fields


def read_config(fields: Mapping[str, Any]) -> EngineConfig:
    """Turns them back."""
    rest = dict(fields)
    device = dict(rest.pop("device"))
    device["op_order"] = {op: tuple(names) for op, names in device["op_order"].items()}
    return EngineConfig(
        scheduler=SchedulerConfig(**rest.pop("scheduler")),
        cache=CacheConfig(**rest.pop("cache")),
        device=DeviceConfig(**device),
        **rest,
    )


def read_kv_spec(fields: Mapping[str, Any]) -> KVSpec:
    """Turns what `dataclasses.asdict` made of a `KVSpec` back."""
    layers = tuple(KVLayerSpec(**layer) for layer in fields["layers"])
    return KVSpec(layers, fields["block_size"], fields["dtype"])


def error_fields(error: BaseException) -> dict[str, Any]:
    """Turns an error into JSON values: its type, its text and its plain attributes."""
    if not isinstance(error, LeadframeError):
        error = InternalError(f"{type(error).__name__}: {error}")
    plain = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | None)}
    return {"type": type(error).__name__, "text": str(error), "attributes": plain}


def read_error(fields: Mapping[str, Any], who: str) -> LeadframeError:
    """Turns them back into an error of the same type, whose text begins with who met it."""
    found = getattr(errors, fields["type"], InternalError)
    kind = found if issubclass(found, LeadframeError) else InternalError
    error: LeadframeError = kind.__new__(kind)
    error.args = (f"{who}: {fields['text']}",)
    vars(error).update(fields["attributes"])
    return error
