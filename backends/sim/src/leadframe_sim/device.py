"""The simulated device: an address space, a queue, and programs that replay on it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform import DeviceLost, DeviceOOM

Buffer = npt.NDArray[Any]


class SimArray:
    """A handle to device memory. It holds an address, never a host pointer."""

    __array_priority__ = 1000

    def __init__(self, device: SimDevice, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.device, self.address = device, address
        self.shape, self.dtype = shape, dtype
        self.release = weakref.finalize(self, device.free, address)
        self.release.atexit = False

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Buffer:
        """What the host sees without waiting for the queue."""
        return self.device.peek(self).astype(dtype or self.dtype)

    def reshape(self, *shape: Any) -> Any:
        """The same elements in another shape."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return self.device.launch(np.reshape, (self, sizes), {})

    def __getitem__(self, index: Any) -> Any:
        return self.device.launch(_getitem, (self, index), {})

    def __repr__(self) -> str:
        return f"SimArray(0x{self.address:x}, {self.shape}, {self.dtype})"


def _getitem(x: Buffer, index: Any) -> Buffer:
    return np.array(x[index])


def _operator(name: str) -> Callable[..., Any]:
    def apply(x: Buffer, *others: Any) -> Any:
        return getattr(x, name)(*others)

    def method(self: SimArray, *others: Any) -> Any:
        return self.device.launch(apply, (self, *others), {})

    return method


_OPERATORS = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow neg invert
and rand or ror xor lt le gt ge eq ne abs
"""
for _name in _OPERATORS.split():
    setattr(SimArray, f"__{_name}__", _operator(f"__{_name}__"))


@dataclass(slots=True)
class Command:
    """One kernel launch: a function, its arguments, and the handles that it fills."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[SimArray]


@dataclass(slots=True)
class Program:
    """Recorded launches. It keeps the handles, and so their memory, alive."""

    commands: list[Command] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Memory of everything that the program writes."""
        handles = {id(h): h for command in self.commands for h in command.outputs}
        return sum(h.device.size_of(h.address) for h in handles.values())


@dataclass(slots=True)
class Failure:
    """Fails the launch with this number, once."""

    kind: str
    at: int


class SimDevice:
    """Memory, queue and failure switches of one simulated device.

    Args:
      total: bytes of memory.
      latency: seconds that a launch takes on the device.
      failure: what goes wrong, and when.
      functional: `put` makes a new array instead of writing in place.
    """

    def __init__(
        self,
        total: int,
        latency: float = 0.0,
        failure: Failure | None = None,
        functional: bool = False,
    ) -> None:
        self.total, self.latency, self.failure = total, latency, failure
        self.functional = functional
        self.used = 0
        self.peak = 0
        self.launches = 0
        self._memory: dict[int, Buffer] = {}
        self._pending: set[int] = set()
        self._next = 0x1000
        self._recording: Program | None = None

    def allocate(self, data: Buffer, phase: str = "step") -> SimArray:
        """Places an array in device memory."""
        size = max(data.nbytes, 1)
        if self.used + size > self.total:
            raise DeviceOOM(size, self.total - self.used, phase)
        address, self._next = self._next, self._next + size
        self._memory[address] = data
        self.used += size
        self.peak = max(self.peak, self.used)
        return SimArray(self, address, data.shape, data.dtype)

    def free(self, address: int) -> None:
        """Gives memory back; an address that is free already is left alone."""
        buffer = self._memory.pop(address, None)
        if buffer is not None:
            self.used -= max(buffer.nbytes, 1)
            self._pending.discard(address)

    def size_of(self, address: int) -> int:
        """Bytes at an address."""
        return self._memory[address].nbytes if address in self._memory else 0

    def buffer(self, handle: SimArray) -> Buffer:
        """Device memory as kernels see it."""
        if handle.address not in self._memory:
            raise ValueError(f"{handle!r} was freed or donated")
        return self._memory[handle.address]

    def peek(self, handle: SimArray) -> Buffer:
        """Device memory as the host sees it without waiting: poison while work is queued."""
        buffer = self.buffer(handle)
        if handle.address not in self._pending:
            return buffer.copy()
        is_float = np.issubdtype(buffer.dtype, np.floating)
        return np.full_like(buffer, np.nan if is_float else -1)

    def synchronize(self) -> None:
        """Waits for the queue."""
        if self.latency:
            time.sleep(self.latency * len(self._pending))
        self._pending.clear()

    def launch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Queues a kernel; returns handles of its results."""
        self._maybe_fail()
        result = function(*self._down(args), **self._down(kwargs))
        outputs: list[SimArray] = []
        handles = self._up(result, args, outputs)
        if self._recording is not None:
            self._recording.commands.append(Command(function, args, kwargs, outputs))
        return handles

    @contextmanager
    def record(self) -> Iterator[Program]:
        """Records every launch inside."""
        self._recording = program = Program()
        try:
            yield program
        finally:
            self._recording = None

    def replay(self, program: Program) -> None:
        """Runs a recording on the addresses that it was recorded with."""
        for command in program.commands:
            self._maybe_fail()
            result = command.function(*self._down(command.args), **self._down(command.kwargs))
            for handle, value in zip(command.outputs, _flat(result), strict=True):
                target = self.buffer(handle)
                if target is not value:
                    target[...] = value
                self._pending.add(handle.address)

    def evaluate(self, program: Program, inputs: Mapping[int, SimArray]) -> dict[int, SimArray]:
        """Runs a recording with other inputs and fresh outputs; returns handles by address."""
        bound = dict(inputs)
        for command in program.commands:
            args, kwargs = _rebind(command.args, bound), _rebind(command.kwargs, bound)
            result = self.launch(command.function, args, kwargs)
            for handle, value in zip(command.outputs, _flat(result), strict=True):
                bound[handle.address] = value
        return bound

    def _maybe_fail(self) -> None:
        self.launches += 1
        if self.failure is None or self.launches != self.failure.at:
            return
        if self.failure.kind == "oom":
            raise DeviceOOM(1, 0, "step")
        if self.failure.kind == "lost":
            raise DeviceLost("the simulated device fell off its bus")
        raise RuntimeError("the simulated driver raised")

    def _down(self, value: Any) -> Any:
        if isinstance(value, SimArray):
            return self.buffer(value)
        if isinstance(value, tuple | list):
            return type(value)(self._down(item) for item in value)
        if isinstance(value, dict):
            return {key: self._down(item) for key, item in value.items()}
        return value

    def _up(self, result: Any, args: Any, outputs: list[SimArray]) -> Any:
        if isinstance(result, tuple):
            return tuple(self._up(item, args, outputs) for item in result)
        if isinstance(result, np.generic):
            result = np.asarray(result)
        if not isinstance(result, np.ndarray):
            return result
        for handle in args:
            if isinstance(handle, SimArray) and self._memory.get(handle.address) is result:
                self._pending.add(handle.address)
                outputs.append(handle)
                return handle
        handle = self.allocate(np.array(result))
        self._pending.add(handle.address)
        outputs.append(handle)
        return handle


def _flat(result: Any) -> list[Any]:
    items = result if isinstance(result, tuple) else (result,)
    return [item for item in items if hasattr(item, "shape")]


def _rebind(value: Any, bound: Mapping[int, SimArray]) -> Any:
    if isinstance(value, SimArray):
        return bound.get(value.address, value)
    if isinstance(value, tuple | list):
        return type(value)(_rebind(item, bound) for item in value)
    if isinstance(value, dict):
        return {key: _rebind(item, bound) for key, item in value.items()}
    return value


__all__ = ["Command", "Failure", "Program", "SimArray", "SimDevice"]
