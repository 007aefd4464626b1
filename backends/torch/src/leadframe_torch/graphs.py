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

    All graphs of a factory share a memory pool: only one of them runs at a time.
    """

    def __init__(self, device: torch.device, graph_type: str) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._graph_type = graph_type
        self._pool: Any = None

    def record(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Warms up on a side stream, then records."""
        module = self._module
        stream = module.Stream(self._device)
        stream.wait_stream(module.current_stream(self._device))
        with module.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        module.current_stream(self._device).wait_stream(stream)
        module.synchronize(self._device)
        before = module.memory_reserved(self._device)
        if self._pool is None:
            self._pool = module.graph_pool_handle()
        graph = getattr(module, self._graph_type)()
        with module.graph(graph, pool=self._pool, stream=stream):
            result = function()
        grown = module.memory_reserved(self._device) - before
        return _ModuleGraph(graph, max(0, grown)), result


class _ModuleGraph:
    def __init__(self, graph: Any, held: int) -> None:
        self._graph, self.bytes = graph, held

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
        self.bytes = 0
