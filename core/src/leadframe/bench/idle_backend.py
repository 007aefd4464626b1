"""A device that computes nothing and takes a given time for it, to measure what the host does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform.backend import KV, KVSpec, Partition, StepFunction, WeightRole, WeightSource
from leadframe.platform.batch import Bucket, StepBatch
from leadframe.platform.info import MemoryInfo
from leadframe.platform.reference.backend import ReferenceBackend

_Array = npt.NDArray[Any]

FIRST_TOKEN = 1000
"""Past the special tokens of any model."""
_MEMORY = 1 << 40


class IdleBackend(ReferenceBackend):
    """Records no work, samples tokens that were drawn beforehand, and keeps a diary of its steps.

    Attributes:
      gaps: (live rows, seconds from the end of the step before to the launch of this one) of each
        step in which as many rows decoded as in the one before.

    Args:
      vocab_size: tokens are below it.
      max_num_seqs: most rows of a step.
      step_seconds: how long a step takes on the device; the host waits for it in `download`.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, step_seconds: float) -> None:
        super().__init__(_MEMORY)
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(FIRST_TOKEN, vocab_size, (64, max_num_seqs), np.int32)
        self._seconds = step_seconds
        self._ready = self._ended = 0.0
        self._num_steps = self._num_rows = 0
        self.gaps: list[tuple[int, float]] = []

    @property
    def caps(self) -> Any:
        """Those of a device that records graphs: decode steps are padded as there."""
        return replace(super().caps, graph="record", asynchronous=True)

    def upload(
        self,
        source: _Array | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> _Array:
        """Reads nothing."""
        return np.zeros(0, np.float32)

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates nothing."""
        return [None for _ in spec.layers]

    def kv_free(self, kv_d: KV) -> None:
        """Frees nothing."""

    def memory(self) -> MemoryInfo:
        """A device with room for any cache."""
        return MemoryInfo(_MEMORY, _MEMORY, 0, 0)

    def download(self, array: _Array) -> _Array:
        """Waits for the step and returns its array."""
        wait = self._ready - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        self._ended = time.perf_counter()
        return array

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> Any:
        """Makes a step that is over as soon as it was launched."""
        return _IdleStep(self, bucket)

    def launch(self, batch: StepBatch) -> _Array:
        """Notes the launch of a step; returns a token for each of its rows."""
        now = time.perf_counter()
        bucket = batch.bucket
        num_rows = batch.live_seqs if bucket.num_decodes else 0
        if num_rows and num_rows == self._num_rows:
            self.gaps.append((num_rows, now - self._ended))
        self._num_rows, self._ready = num_rows, now + self._seconds
        self._num_steps += 1
        tokens: _Array = self._tokens[self._num_steps % len(self._tokens)][: bucket.num_seqs]
        return tokens


class _IdleStep:
    """One bucket of an idle device."""

    def __init__(self, backend: IdleBackend, bucket: Bucket) -> None:
        self._backend = backend
        self.bytes, self.compile_seconds, self.capture_seconds = 0, 0.0, 0.0
        self.cache_hit: bool | None = None
        self._outputs: dict[str, _Array] = {}
        if bucket.num_logits:
            self._outputs["finite"] = np.ones(bucket.num_logits, bool)
        if bucket.sample in ("plain", "threshold", "sort"):
            self._outputs["covered"] = np.ones(bucket.num_seqs, bool)
        if bucket.num_logprobs is not None:
            rows, k = bucket.num_seqs, bucket.num_logprobs
            self._outputs |= {"logprob": np.zeros(rows, np.float32), "rank": np.ones(rows, int)}
            self._outputs["top_ids"] = np.zeros((rows, k), np.int32)
            self._outputs["top_logprobs"] = np.zeros((rows, k), np.float32)

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, _Array], KV]:
        """Launches."""
        tokens = self._backend.launch(batch)
        return {"tokens": tokens, **self._outputs}, kv_d

    def close(self) -> None:
        """Holds nothing."""
