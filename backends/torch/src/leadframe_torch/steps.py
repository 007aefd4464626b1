"""Compiled steps: the function itself, with layers under torch.compile, or with a recorded graph.

Of a `SplitStep`, layers alone are compiled or recorded, and its head runs as it is: the host
launches its few kernels while the device is still busy with the layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from leadframe.errors import CompileError
from leadframe.platform.backend import KV, SplitStep, StepFunction
from leadframe.platform.batch import (
    Bucket,
    StepArrays,
    StepBatch,
    float_fields,
    forward_arrays,
    forward_bucket,
    int_fields,
    packed_sizes,
    unpack,
)
from leadframe_torch.recordings import Outputs, Recordings

Errors = Callable[[], AbstractContextManager[None]]
"""Makes a context in which torch's errors become the contract's."""

_HOST_TYPES = (np.int32, np.float32)


def _upload(batch: StepBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copies a batch's packed ints and floats to the device."""
    return torch.from_numpy(batch.ints).to(device), torch.from_numpy(batch.floats).to(device)


class FunctionStep:
    """A step that runs as Python: eagerly, or through a compiled version of the function.

    It holds nothing on the device between runs: an engine keeps hundreds of steps of exact sizes,
    whose block tables may be megabytes each.

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
        self.function, self._bucket, self._weights = function, bucket, weights
        self._device, self._errors = device, errors
        self.bytes = 0
        self.compile_seconds = 0.0
        self.capture_seconds = 0.0
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Uploads the batch and calls the function."""
        with self._errors(), torch.inference_mode():
            arrays = unpack(self._bucket, *_upload(batch, self._device))
            return self.function(self._weights, kv_d, arrays)

    def close(self) -> None:
        """Holds nothing of its own."""


class RecordedStep:
    """A step whose layers are a graph: a run is the upload, one launch, and those of the head.

    A function that is no `SplitStep` is recorded whole.
    """

    def __init__(
        self,
        function: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        recordings: Recordings,
        device: torch.device,
        errors: Errors = nullcontext,
    ) -> None:
        self._bucket, self._weights = bucket, weights
        self._device, self._errors = device, errors
        self._recordings = recordings
        self._split = function if isinstance(function, SplitStep) else None
        recorded: StepFunction = function
        sizes = bucket
        if self._split is not None:
            recorded, sizes = self._split.forward, forward_bucket(bucket)
        self._recording = recordings.share(recorded, sizes, weights, kv)
        self._is_open = True
        is_first = self._recording.num_users == 1
        self.bytes = self._recording.bytes if is_first else 0
        self.compile_seconds = 0.0
        self.capture_seconds = self._recording.seconds if is_first else 0.0
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Uploads the batch and runs it, on the KV that the graph was recorded with."""
        if not self._recording.reads(kv_d):
            raise CompileError("a recorded step", "it was given another KV cache than it recorded")
        with self._errors(), torch.inference_mode():
            ints, floats = _upload(batch, self._device)
            self._recording.fill(ints, floats)
            self._recording.replay()
            self._recordings.latest = unpack(self._bucket, ints, floats)
            return self._head(), kv_d

    def replay(self) -> None:
        """Runs the latest batch once more: the device's part of a step, for benchmarks."""
        with torch.inference_mode():
            self._recording.replay()
            self._head()

    def _head(self) -> Outputs:
        outputs, latest = self._recording.outputs, self._recordings.latest
        if self._split is None or latest is None or latest.bucket != self._bucket:
            return outputs
        return self._split.head(self._weights, outputs, latest)

    def close(self) -> None:
        """Lets the recording go, which frees the graph that no other step shares."""
        if self._is_open:  # a second time would let go of what others still replay
            self._is_open = False
            self._recording.release()
            self.bytes = 0


class TracedStep:
    """A `SplitStep` whose layers run through torch.compile."""

    def __init__(self, step: SplitStep, bucket: Bucket) -> None:
        self._step, self._layers = step, _traced(step.forward, forward_bucket(bucket))

    def __call__(
        self, weights: Mapping[str, Any], kv_d: KV, arrays: StepArrays
    ) -> tuple[Outputs, KV]:
        """Runs layers and head."""
        hidden, kv = self.forward(weights, kv_d, arrays)
        return self.head(weights, hidden, arrays), kv

    def forward(
        self, weights: Mapping[str, Any], kv_d: KV, arrays: StepArrays
    ) -> tuple[Outputs, KV]:
        """Runs the compiled layers, on the arrays that they were compiled for."""
        return self._layers(weights, kv_d, forward_arrays(arrays))

    def head(
        self, weights: Mapping[str, Any], hidden: Mapping[str, Any], arrays: StepArrays
    ) -> Outputs:
        """Runs the step's own head, as Python."""
        return self._step.head(weights, hidden, arrays)


class Tracer:
    """Compiles steps with torch.compile; steps that differ only in their heads share the layers."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[tuple[SplitStep, Bucket], TracedStep] = (
            WeakValueDictionary()
        )

    def trace(
        self,
        function: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        device: torch.device,
        errors: Errors = nullcontext,
    ) -> FunctionStep:
        """Compiles a step for one bucket, and runs it once on padding.

        Raises:
          CompileError: the step is not one graph.
        """
        start, misses = time.perf_counter(), _cache_misses()
        step = FunctionStep(self._traced(function, bucket), bucket, weights, device, errors)
        step.run(padding_batch(bucket), kv)
        step.compile_seconds = time.perf_counter() - start
        step.cache_hit = _cache_misses() == misses
        return step

    def _traced(self, function: StepFunction, bucket: Bucket) -> StepFunction:
        if not isinstance(function, SplitStep):
            return _traced(function, bucket)
        key = (function, forward_bucket(bucket))
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = TracedStep(function, bucket)
        return known


def padding_batch(bucket: Bucket) -> StepBatch:
    """A batch without a live row: running it writes to the null block alone."""
    ints, floats = (np.zeros(n, t) for n, t in zip(packed_sizes(bucket), _HOST_TYPES, strict=True))
    return StepBatch(bucket, ints, floats, live_tokens=0, live_seqs=0, max_seq_len=0)


def _traced(function: StepFunction, bucket: Bucket) -> StepFunction:
    """The batch crosses into the graph as plain tensors; its dataclass is rebuilt inside."""
    names = [name for name, _ in int_fields(bucket) + float_fields(bucket)]

    def flat(weights: Mapping[str, Any], kv: KV, tensors: list[Tensor]) -> Any:
        return function(weights, kv, StepArrays(bucket, **dict(zip(names, tensors, strict=True))))

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
