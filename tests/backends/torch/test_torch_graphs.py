"""Recording graphs: what is asked of a device module, and what a graph says that it holds."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from leadframe_torch import ModuleGraphs

POOL_BYTES, CACHED_BYTES = 3 << 20, 20 << 20


class Stream:
    def wait_stream(self, other):
        pass


class PretendModule:
    """An allocator as torch's: freed memory stays reserved, recording begins by giving it back.

    A pool takes memory once for each stream that records into it.
    """

    def __init__(self):
        self.cached = 0
        self.pools = {}
        self.streams = []
        self.current = Stream()
        self.handles = 0
        self.runs = []
        self.recording = None

    def work(self):
        """Runs something that takes memory."""
        self.runs.append(self.current)
        if self.recording:
            self.pools[self.recording] = POOL_BYTES
        else:
            self.cached = CACHED_BYTES

    def Stream(self, device):
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device):
        pass

    def empty_cache(self):
        self.cached = 0

    def memory_reserved(self, device):
        return self.cached + sum(self.pools.values())

    def graph_pool_handle(self):
        self.handles += 1
        return self.handles

    def CUDAGraph(self):
        class Graph:
            replays = 0
            resets = 0

            def replay(self):
                self.replays += 1

            def reset(self):
                self.resets += 1

        return Graph()

    @contextmanager
    def graph(self, graph, pool, stream):
        self.empty_cache()
        with self.stream(stream):
            self.recording = (pool, stream)
            yield
            self.recording = None


@pytest.fixture
def module(monkeypatch):
    module = PretendModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.fixture
def record(module):
    graphs = ModuleGraphs(torch.device("cuda", 0), "CUDAGraph")
    return lambda: graphs.record(module.work)[0]


def test_a_graph_holds_what_recording_took(record):
    """Not less what warming up had left in the allocator, which is given back in between."""
    assert record().bytes == POOL_BYTES


def test_graphs_share_their_memory(module, record):
    first, second = record(), record()
    assert len(module.pools) == 1, "a pool is shared only within a stream"
    assert second.bytes == 0
    assert len(module.streams) == 1
    assert module.runs == module.streams * 6, "warm-ups run where they are recorded"
    first.close()
    record()
    assert module.handles == 1


def test_a_pool_whose_graphs_are_gone_is_not_used_again(module, record):
    graphs = [record(), record()]
    for graph in graphs:
        graph.close()
        graph.close()
    record()
    assert module.handles == 2
    assert all(graph.bytes == 0 for graph in graphs)
