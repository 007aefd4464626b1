"""Graph capture without naming a device: record a step once, replay it by its addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

_WARM_UP_RUNS = 2
"""Runs before a capture: lazy initialisation and allocator growth must not be recorded."""


class Graph(Protocol):
    """A recorded sequence of device work.

    Attributes:
      bytes: device memory that the recording holds.
    """

    bytes: int

    def replay(self) -> None:
        """Runs the work again, on whatever its inputs hold now."""

    def close(self) -> None:
        """Frees the recording."""


class GraphFactory(Protocol):
    """Records graphs on one device."""

    def record(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Warms up, records one call of `function`, and returns its graph and its result.

        The result's tensors keep their addresses: a replay fills them again. `function` must
        read its inputs from tensors that live as long as the graph.
        """


class ModuleGraphs:
    """Graphs of a torch device module with the interface that CUDA introduced.

    All graphs of a factory share a memory pool: only one of them runs at a time. They share it
    only if they are recorded on one stream, since an allocator keeps freed memory by stream; and
    libraries keep a workspace for each stream that they have seen.
    """

    def __init__(self, device: torch.device, graph_type: str) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._graph_type = graph_type
        self._stream: Any = None
        self._pool: Any = None
        self._open = 0

    def record(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Warms up on a side stream, then records."""
        module = self._module
        self._warm_up(function)
        if not self._open:
            # An allocator refuses a pool whose graphs are all gone while its memory is not.
            self._pool = module.graph_pool_handle()
        graph = getattr(module, self._graph_type)()
        # What warming up has left is no part of the graph, and recording would give it back.
        module.empty_cache()
        before = module.memory_reserved(self._device)
        with module.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        grown = module.memory_reserved(self._device) - before
        self._open += 1
        return _ModuleGraph(graph, max(0, grown), self._closed), result

    def _warm_up(self, function: Callable[[], Any]) -> None:
        module, device = self._module, self._device
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_stream(module.current_stream(device))
        with module.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        module.current_stream(device).wait_stream(self._stream)
        module.synchronize(device)

    def _closed(self) -> None:
        self._open -= 1


class _ModuleGraph:
    def __init__(self, graph: Any, held: int, on_close: Callable[[], None]) -> None:
        self._graph, self.bytes = graph, held
        self._on_close: Callable[[], None] | None = on_close

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
        self.bytes = 0
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
