"""Records a step as a list of native calls, and runs that list without Python in between.

A recording is made while the step runs for real. Calls of native kernels are noted with their
arguments; ops that torch computes are noted as functions that compute them again into the same
memory. What a kernel reads from the batch, it reads again at every run: lengths, tables, slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leadframe_cpu.arena import Arena, Region
from leadframe_cpu.library import Kernel, Library
from leadframe_cpu.merging import MergedCall, merge

Replay = Callable[[], None]

_UNREPEATABLE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Ops that may give another shape, or a value to branch on, when they run again."""


class NotRecordable(Exception):
    """A step did something that a recording cannot repeat, such as reading a value."""


class _Segment:
    """Native calls in a row."""

    def __init__(self, library: Library, calls: Sequence[MergedCall]) -> None:
        self._library, self._count, self._calls = library, len(calls), calls
        # the buffers that the table points into
        self._arguments = [ctypes.create_string_buffer(call.packed) for call in calls]
        self._table = (ctypes.c_void_p * (2 * len(calls)))()
        for index, (call, buffer) in enumerate(zip(calls, self._arguments, strict=True)):
            self._table[2 * index] = call.address
            self._table[2 * index + 1] = ctypes.addressof(buffer)
        self._address = ctypes.addressof(self._table)

    def __call__(self) -> None:
        self._library.run(self._address, self._count)


class Recording:
    """A step that was recorded, or is being recorded.

    Args:
      library: runs the calls.
      arena: the memory of what the step computes.
      products: the kernel of one product, and that of several of the same input.

    Attributes:
      num_native: native calls in it.
      num_torch: ops that torch computes in it.
    """

    def __init__(self, library: Library, arena: Arena, products: tuple[Kernel, Kernel]) -> None:
        self._library, self._region, self._products = library, Region(arena), products
        self._calls: list[tuple[Kernel, bytes]] = []
        self._parts: list[Replay] = []
        self._held: list[Any] = []
        self.num_native = 0
        self.num_torch = 0

    # --- while recording ------------------------------------------------------------------

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory whose address the recording may keep."""
        return self._region.new(shape, dtype)

    def add(self, kernel: Kernel, packed: bytes) -> None:
        """Notes a native call."""
        self._calls.append((kernel, packed))
        self.num_native += 1

    def add_torch(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Notes an op that torch computed, to be computed again into `result`."""
        self._close_segment()
        results = result if isinstance(result, tuple | list) else (result,)
        is_in_place = op._schema.is_mutable
        self._held.append((args, kwargs, results))
        self.num_torch += 1

        def again() -> None:
            made = op(*args, **kwargs)
            if is_in_place:
                return
            for old, new in zip(results, made if len(results) > 1 else (made,), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self._parts.append(again)

    def finish(self, *outputs: Any) -> None:
        """Ends the recording; the outputs keep their memory."""
        self._close_segment()
        self._held.append(outputs)

    def _close_segment(self) -> None:
        if self._calls:
            self._parts.append(_Segment(self._library, merge(self._calls, *self._products)))
            self._calls = []

    # --- afterwards -----------------------------------------------------------------------

    def replay(self) -> None:
        """Runs everything again."""
        for part in self._parts:
            part()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op that torch runs itself while a step is recorded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch.compile out: shielding this mode from it would import it, for two seconds.

        That import would fall into the middle of the first request's stream.
        """
        return False

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an op, and notes it unless it computes nothing."""
        kwargs = kwargs or {}
        if not _UNREPEATABLE.isdisjoint(func.tags):
            raise NotRecordable(f"{func} gives a result whose shape depends on values")
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor | tuple | list):
            raise NotRecordable(f"{func} returned a {type(result).__name__}")
        if not _computes_nothing(func, args, result):
            self._recording.add_torch(func, args, kwargs, result)
        return result


def _computes_nothing(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an op only made a view or uninitialised memory.

    What may return a view (`reshape`, `contiguous`, `to`) is seen whole in inference mode, and
    has computed if its result is not memory that it was given.
    """
    if func.namespace == "aten" and func._opname.startswith(("empty", "new_empty")):
        return True
    returns = func._schema.returns
    may_alias = bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    return may_alias and _storages(result) <= _storages(args)


def _storages(values: Any) -> set[int]:
    """The addresses of the memory behind a tensor, or behind those in a sequence."""
    if isinstance(values, Tensor):
        return {values.untyped_storage().data_ptr()}
    if isinstance(values, tuple | list):
        return set().union(*map(_storages, values))
    return set()
