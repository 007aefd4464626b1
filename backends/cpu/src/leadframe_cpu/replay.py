"""Steps that only decode: run as Python at first, then recorded, then replayed.

One recording serves every width of the block table up to its own, so a sequence that grows does
not need a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch

from leadframe.platform.backend import KV, StepFunction
from leadframe.platform.batch import Bucket, StepArrays, StepBatch, packed_sizes, unpack
from leadframe_cpu.arena import Arena
from leadframe_cpu.library import Library
from leadframe_cpu.native_kv import NativeKV
from leadframe_cpu.native_ops import NativeOps
from leadframe_cpu.recording import NotRecordable, Recording, Watch

Outputs = dict[str, Any]

MAX_ROWS: Final = 64
"""Steps with more rows are not recorded: next to their products, Python costs nothing."""

_MAX_RECORDINGS: Final = 96
_FIELDS: Final = tuple(f.name for f in fields(StepArrays) if f.name != "bucket")
_MIN_WIDTH: Final = 32


def is_worth_recording(bucket: Bucket) -> bool:
    """Whether a bucket only decodes, and so comes again and again."""
    only_decodes = bucket.num_tokens == bucket.num_decodes == bucket.num_seqs
    return only_decodes and 0 < bucket.num_seqs <= MAX_ROWS


def padded(bucket: Bucket) -> Bucket:
    """The bucket that a step is recorded for: a block table with room to grow."""
    width = _MIN_WIDTH
    while width < bucket.num_blocks:
        width *= 2
    return replace(bucket, num_blocks=width)


class _Inputs:
    """The batch at addresses that stay."""

    def __init__(self, bucket: Bucket) -> None:
        num_ints, num_floats = packed_sizes(bucket)
        ints, floats = torch.zeros(num_ints, dtype=torch.int32), torch.zeros(num_floats)
        self.arrays = unpack(bucket, ints, floats)
        self._host = unpack(bucket, ints.numpy(), floats.numpy())

    def fill(self, batch: StepBatch) -> None:
        """Copies a batch whose block table is at most as wide."""
        given = unpack(batch.bucket, batch.ints, batch.floats)
        for name in _FIELDS:
            source = getattr(given, name)
            if name == "block_table":
                self._host.block_table[:, : source.shape[1]] = source
            elif source is not None:
                np.copyto(getattr(self._host, name), source)


@dataclass(slots=True)
class _Entry:
    """What is known about one kind of step."""

    inputs: _Inputs
    function: StepFunction
    weights: Mapping[str, Any]
    kv: KV
    runs: int = 0
    recording: Recording | None = None
    outputs: Outputs | None = None
    is_refused: bool = False

    def serves(self, function: StepFunction, weights: Mapping[str, Any], kv: KV) -> bool:
        """Whether the recorded addresses are those of the given objects."""
        same_cache = len(kv) == len(self.kv) and all(
            a is b for a, b in zip(kv, self.kv, strict=True)
        )
        return function is self.function and weights is self.weights and same_cache


class Recorder:
    """The recordings of a backend, least recently used last.

    Attributes:
      arena: the memory that they share.
    """

    def __init__(self, library: Library, ops: NativeOps) -> None:
        self.arena = Arena()
        self._library, self._ops = library, ops
        self._entries: OrderedDict[Bucket, _Entry] = OrderedDict()

    def clear(self) -> None:
        """Forgets every recording: an address in them is about to become invalid."""
        self._entries.clear()

    def run(
        self, function: StepFunction, weights: Mapping[str, Any], batch: StepBatch, kv: KV
    ) -> tuple[Outputs, KV]:
        """Runs a step, by replaying it if it has been recorded."""
        entry = self._entry(function, weights, padded(batch.bucket), kv)
        entry.inputs.fill(batch)
        entry.runs += 1
        if entry.recording is not None and entry.outputs is not None:
            with torch.inference_mode():
                entry.recording.replay()
            return entry.outputs, kv
        # the first run may be the only one, and it warms what torch initialises lazily
        if entry.runs > 1 and not entry.is_refused:
            return self._record(entry)
        with torch.inference_mode():
            return function(weights, kv, entry.inputs.arrays)

    def _record(self, entry: _Entry) -> tuple[Outputs, KV]:
        recording = Recording(self._library, self.arena, self._ops.products)
        self._ops.tape = recording
        try:
            with torch.inference_mode(), Watch(recording):
                outputs, kv = entry.function(entry.weights, entry.kv, entry.inputs.arrays)
            recording.finish(outputs)
            entry.recording, entry.outputs = recording, outputs
            return outputs, kv
        except NotRecordable:
            entry.is_refused = True
        finally:
            self._ops.tape = None
        with torch.inference_mode():  # running twice writes the same K and V to the same slots
            return entry.function(entry.weights, entry.kv, entry.inputs.arrays)

    def _entry(
        self, function: StepFunction, weights: Mapping[str, Any], bucket: Bucket, kv: KV
    ) -> _Entry:
        entry = self._entries.get(bucket)
        if entry is None or not entry.serves(function, weights, kv):
            # the list is copied: the step returns a list of its own, of the same layers
            entry = self._entries[bucket] = _Entry(_Inputs(bucket), function, weights, list(kv))
        self._entries.move_to_end(bucket)
        if len(self._entries) > _MAX_RECORDINGS:
            self._entries.popitem(last=False)
        return entry


class ReplayedStep:
    """A decode step of a `Recorder`."""

    def __init__(
        self, recorder: Recorder, function: StepFunction, weights: Mapping[str, Any]
    ) -> None:
        self._recorder, self._function, self._weights = recorder, function, weights
        self.bytes = 0
        self.compile_seconds = 0.0
        self.capture_seconds = 0.0
        self.cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        """Copies the batch and runs the step."""
        return self._recorder.run(self._function, self._weights, batch, kv_d)

    def close(self) -> None:
        """Holds nothing of its own."""


def has_native_cache(kv: KV) -> bool:
    """Whether every layer is laid out for the native attention kernel."""
    return all(isinstance(layer, NativeKV) for layer in kv)
