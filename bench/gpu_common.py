"""What the stages of the GPU check share: arguments, reports that survive, and timing."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every stage takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--report", type=Path, required=True)
    made.add_argument("--device", default="cuda")
    made.add_argument("--warm", action="store_true", help="only compile what will be measured")
    made.add_argument("--toy", action="store_true", help="sizes that an interpreter can run")
    return made


def prepare(device: str) -> None:
    """Decides Triton's mode before anything imports it."""
    if device.endswith(":interpreter"):
        os.environ["TRITON_INTERPRET"] = "1"


class Report:
    """A JSON object on disk, rewritten whenever something is added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def put(self, **values: Any) -> None:
        """Adds values."""
        self.values.update(values)
        self._path.write_text(json.dumps(self.values, indent=1))

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """Adds the result of a measurement, or why there is none; returns the result or None."""
        try:
            value = measure()
        except Exception as error:  # a peer that is absent must not cost the others
            self.put(**{name: {"error": f"{type(error).__name__}: {str(error)[:300]}"}})
            return None
        self.put(**{name: value})
        return value


class Clock:
    """Times device work: by events and a graph on a GPU, by the wall on the host."""

    def __init__(self, device: Any, repeats: int = 5, inner: int = 5) -> None:
        import torch

        self._device, self._repeats, self._inner = device, repeats, inner
        self._gpu: Any = torch.get_device_module(device)

    def seconds(self, function: Callable[[], Any], *, graph: bool = True) -> float:
        """Seconds of one call: the median of several, each the mean of some calls in a row.

        With `graph`, the calls are recorded first, so that the host's part does not count; what
        cannot be recorded is timed as it is.
        """
        if self._device.type == "cpu":
            return _wall(function)
        for _ in range(3):
            function()
        self._gpu.synchronize()
        replay = self._record(function) if graph else None
        times = []
        for _ in range(self._repeats):
            begin, end = (self._gpu.Event(enable_timing=True) for _ in range(2))
            begin.record()
            if replay is not None:
                replay()
            else:
                for _ in range(self._inner):
                    function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / self._inner)
        return sorted(times)[len(times) // 2]

    def _record(self, function: Callable[[], Any]) -> Callable[[], None] | None:
        graph = self._gpu.CUDAGraph()
        try:
            with self._gpu.graph(graph):
                for _ in range(self._inner):
                    function()
        except RuntimeError:
            self._gpu.synchronize()
            return None
        graph.replay()
        replay: Callable[[], None] = graph.replay
        return replay


def _wall(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
