"""What `compile` returns: a plain step, a recording with baked addresses, or an executable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform import (
    KV,
    Bucket,
    PlatformError,
    StepBatch,
    StepFunction,
    packed_sizes,
    unpack,
)
from leadframe_sim.device import Program, SimArray, SimDevice

Outputs = dict[str, Any]


def padding_batch(bucket: Bucket) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Packed buffers of a step that holds padding only."""
    num_ints, num_floats = packed_sizes(bucket)
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    starts = np.minimum(np.arange(bucket.num_seqs + 1), bucket.num_decodes)
    ints[: bucket.num_seqs + 1] = starts
    return ints, floats


class PlainStep:
    """Runs the step kernel by kernel."""

    def __init__(
        self, device: SimDevice, step: StepFunction, bucket: Bucket, weights: Mapping[str, Any]
    ) -> None:
        self.device, self.step, self.bucket, self.weights = device, step, bucket, weights
        self.bytes = 0
        self.compile_seconds = self.capture_seconds = 0.0
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Uploads the batch and queues every kernel."""
        ints = self.device.allocate(batch.ints.copy())
        floats = self.device.allocate(batch.floats.copy())
        with np.errstate(all="ignore"):
            return self.step(self.weights, kv_d, unpack(self.bucket, ints, floats))

    def close(self) -> None:
        """Holds nothing."""


class _Recorded:
    """A program, and the buffers that it reads its batch from."""

    def __init__(
        self,
        device: SimDevice,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
    ) -> None:
        started = time.perf_counter()
        self.device, self.bucket, self.weights = device, bucket, weights
        self.kv = list(kv)
        ints, floats = padding_batch(bucket)
        before = device.used
        self.ints, self.floats = device.allocate(ints), device.allocate(floats)
        with device.record() as program, np.errstate(all="ignore"):
            self.outputs, self.kv_out = step(
                weights, list(kv), unpack(bucket, self.ints, self.floats)
            )
        self.program: Program = program
        self.bytes = device.used - before
        self.compile_seconds = 0.0
        self.capture_seconds = time.perf_counter() - started
        self.cache_hit: bool | None = None

    def close(self) -> None:
        """Drops the recording and its memory."""
        self.program = Program()
        self.outputs, self.kv_out, self.kv, self.weights = {}, [], [], {}
        self.ints = self.floats = None  # type: ignore[assignment]

    def _check(self, batch: StepBatch) -> None:
        if batch.bucket != self.bucket:
            raise PlatformError(f"the batch is for {batch.bucket}, the step for {self.bucket}")


class RecordedStep(_Recorded):
    """Replays on the addresses that it was captured with."""

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Copies the batch into the captured buffers and replays."""
        self._check(batch)
        if [layer.address for layer in kv_d] != [layer.address for layer in self.kv]:
            raise PlatformError("the KV cache moved since the step was captured; capture it again")
        self.device.buffer(self.ints)[...] = batch.ints
        self.device.buffer(self.floats)[...] = batch.floats
        with np.errstate(all="ignore"):
            self.device.replay(self.program)
        return self.outputs, list(self.kv_out)


class ExecutableStep(_Recorded):
    """Evaluates a traced program: inputs are parameters, donated ones die."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compile_seconds, self.capture_seconds = self.capture_seconds, 0.0

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Binds the batch and the KV to the program's parameters and evaluates it."""
        self._check(batch)
        inputs = {
            self.ints.address: self.device.allocate(batch.ints.copy()),
            self.floats.address: self.device.allocate(batch.floats.copy()),
        }
        inputs |= {old.address: new for old, new in zip(self.kv, kv_d, strict=True)}
        with np.errstate(all="ignore"):
            bound = self.device.evaluate(self.program, inputs)
        outputs = {name: _bound(bound, handle) for name, handle in self.outputs.items()}
        kv = [_bound(bound, handle) for handle in self.kv_out]
        kept = {handle.address for handle in kv}
        for handle in kv_d:
            if handle.address not in kept:
                handle.release()
        return outputs, kv


def _bound(bound: Mapping[int, SimArray], handle: Any) -> Any:
    return bound.get(handle.address, handle)


__all__ = ["ExecutableStep", "PlainStep", "RecordedStep", "padding_batch"]
