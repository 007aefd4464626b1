"""Compiled steps: the function itself, the function under torch.compile, or a recorded graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadframe.errors import CompileError
from leadframe.platform.backend import KV, StepFunction
from leadframe.platform.batch import Bucket, StepArrays, StepBatch, packed_sizes, unpack
from leadframe_torch.graphs import Graph, GraphFactory

Outputs = dict[str, Any]

Errors = Callable[[], AbstractContextManager[None]]
"""Makes a context in which torch's errors become the contract's."""

_HOST_TYPES = (np.int32, np.float32)


class InputBuffers:
    """A bucket's two packed buffers on the device, and the named views into them.

    They keep their addresses: a recorded graph reads its batch from here.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        num_ints, num_floats = packed_sizes(bucket)
        self._ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self._floats = torch.zeros(num_floats, dtype=torch.float32, device=device)
        self.arrays = unpack(bucket, self._ints, self._floats)
        self.bytes = 4 * (num_ints + num_floats)

    def fill(self, batch: StepBatch) -> None:
        """Copies a batch in."""
        _copy(self._ints, batch.ints)
        _copy(self._floats, batch.floats)


def _copy(target: Tensor, source: npt.NDArray[Any]) -> None:
    if source.size:
        target.copy_(torch.from_numpy(source))


class FunctionStep:
    """A step that runs as Python: eagerly, or through a compiled version of the function.

    Attributes:
      function: what a run calls.
    """

    def __init__(
        self,
        function: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        device: torch.device,
        errors: Errors = nullcontext,
    ) -> None:
        self.function, self._weights, self._errors = function, weights, errors
        self._inputs = InputBuffers(bucket, device)
        self.bytes = self._inputs.bytes
        self.compile_seconds = 0.0
        self.capture_seconds = 0.0
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Uploads the batch and calls the function."""
        with self._errors(), torch.inference_mode():
            self._inputs.fill(batch)
            return self.function(self._weights, kv_d, self._inputs.arrays)

    def close(self) -> None:
        """Frees the buffers."""
        del self._inputs
        self.bytes = 0


class RecordedStep:
    """A step recorded as a graph: a run is two copies and one launch."""

    def __init__(
        self,
        function: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        device: torch.device,
        graphs: GraphFactory,
        errors: Errors = nullcontext,
    ) -> None:
        start = time.perf_counter()
        self._kv, self._weights, self._errors = kv, weights, errors
        self._inputs = InputBuffers(bucket, device)
        arrays = self._inputs.arrays

        # zeros are a batch of padding: recording writes to the null block alone
        def call() -> tuple[Outputs, KV]:
            return function(weights, kv, arrays)

        self._graph: Graph
        with torch.inference_mode():
            self._graph, (self._outputs, _) = graphs.record(call)
        self.bytes = self._inputs.bytes + self._graph.bytes
        self.compile_seconds = 0.0
        self.capture_seconds = time.perf_counter() - start
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Uploads the batch and replays the graph, on the KV that it was recorded with."""
        self._check_same(kv_d)
        with self._errors(), torch.inference_mode():
            self._inputs.fill(batch)
            self._graph.replay()
        return self._outputs, kv_d

    def replay(self) -> None:
        """Runs the batch that is there once more: the device's part of a step, for benchmarks."""
        self._graph.replay()

    def _check_same(self, kv: KV) -> None:
        if len(kv) != len(self._kv) or any(a is not b for a, b in zip(kv, self._kv, strict=True)):
            raise CompileError("a recorded step", "it was given another KV cache than it recorded")

    def close(self) -> None:
        """Frees the graph and the buffers."""
        self._graph.close()
        self._outputs = {}
        del self._inputs
        self.bytes = 0


def traced_step(
    function: StepFunction,
    bucket: Bucket,
    weights: Mapping[str, Any],
    kv: KV,
    device: torch.device,
    errors: Errors = nullcontext,
) -> FunctionStep:
    """Compiles a step for one bucket with torch.compile, and runs it once on padding.

    Raises:
      CompileError: the step is not one graph.
    """
    start, misses = time.perf_counter(), _cache_misses()
    step = FunctionStep(_traced(function, bucket), bucket, weights, device, errors)
    step.run(padding_batch(bucket), kv)
    step.compile_seconds = time.perf_counter() - start
    step.cache_hit = _cache_misses() == misses
    return step


def padding_batch(bucket: Bucket) -> StepBatch:
    """A batch without a live row: running it writes to the null block alone."""
    ints, floats = (np.zeros(n, t) for n, t in zip(packed_sizes(bucket), _HOST_TYPES, strict=True))
    return StepBatch(bucket, ints, floats, live_tokens=0, live_seqs=0, max_seq_len=0)


def _traced(function: StepFunction, bucket: Bucket) -> StepFunction:
    """The batch crosses into the graph as plain tensors; its dataclass is rebuilt inside."""
    names = [f.name for f in fields(StepArrays) if f.name != "bucket"]

    def flat(weights: Mapping[str, Any], kv: KV, tensors: list[Tensor | None]) -> Any:
        return function(weights, kv, StepArrays(bucket, *tensors))

    compiled: Callable[..., Any] = torch.compile(flat, fullgraph=True, dynamic=False)

    def step(weights: Mapping[str, Any], kv: KV, arrays: StepArrays) -> tuple[Outputs, KV]:
        tensors = [getattr(arrays, name) for name in names]
        try:
            result: tuple[Outputs, KV] = compiled(weights, kv, tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CompileError(bucket, str(error)[:500]) from error
        return result

    return step


def _cache_misses() -> int:
    """How often Inductor has found nothing in its cache on disk, in this process."""
    counters = torch._dynamo.utils.counters["inductor"]
    return int(counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"])
