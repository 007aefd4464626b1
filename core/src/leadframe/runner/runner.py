"""Runs what the scheduler chose: builds the batch, finds a compiled step, reads the results.

The runner owns the KV cache, the weights and the compiled steps. It must not decide anything
about requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform.backend import KV, Array, Backend, CompiledStep, KVSpec
from leadframe.platform.batch import Bucket, StepBatch
from leadframe.platform.ops import Ops
from leadframe.request import Request
from leadframe.runner.batch_builder import BatchBuilder
from leadframe.runner.buckets import BucketPolicy
from leadframe.runner.profile import full_batch
from leadframe.runner.result import StepResult, read_result
from leadframe.runner.step import ModelStep, StepModel
from leadframe.scheduler import SchedulerOutput

_MAX_LATE_STEPS = 512
"""Steps kept for buckets that start-up did not prepare; most are little more than a closure."""

OnCompiled = Callable[[Bucket, CompiledStep], None]
OnLaunch = Callable[[], None]


class ModelRunner:
    """One model on one backend.

    Args:
      backend: the device.
      model: its step functions.
      weights: what `load_weights` uploaded.
      ops: the op table that was resolved for the model.

    Attributes:
      on_late: called when a step had to be compiled or captured after start-up.
    """

    def __init__(
        self, backend: Backend, model: StepModel, weights: Mapping[str, Array], ops: Ops
    ) -> None:
        self.backend = backend
        self._weights = weights
        self._step = ModelStep(model, ops)
        self._kv: KV = []
        self._spec: KVSpec | None = None
        self._prepared: dict[Bucket, CompiledStep] = {}
        self._late: OrderedDict[Bucket, CompiledStep] = OrderedDict()
        self.on_late: OnCompiled | None = None
        self._policy: BucketPolicy | None = None
        self._builder: BatchBuilder | None = None

    # --- start-up -----------------------------------------------------------------------

    def allocate(self, spec: KVSpec, num_blocks: int) -> None:
        """Replaces the KV cache, and drops the steps that were made for the old one."""
        self.release()
        self._kv, self._spec = self.backend.kv_alloc(spec, num_blocks), spec

    def release(self) -> None:
        """Frees the KV cache and every compiled step."""
        for step in (*self._prepared.values(), *self._late.values()):
            step.close()
        self._prepared.clear()
        self._late.clear()
        if self._kv:
            self.backend.kv_free(self._kv)
            self._kv = []

    def configure(self, policy: BucketPolicy, builder: BatchBuilder) -> None:
        """Sets how batches are built and which buckets are worth preparing."""
        self._policy, self._builder = policy, builder

    def prepare(self, on_compiled: OnCompiled | None = None) -> int:
        """Compiles every bucket that the policy lists and returns the bytes they hold.

        Then runs the usual ways to sample once, so that what a head builds lazily is there: without
        capturing, since a device that records steps whole would hold three for each.
        """
        assert self._policy is not None
        for bucket in self._policy.all_buckets():
            self._prepared[bucket] = self._compile(bucket, capture=True)
        # Asked only now: a backend may compile behind the call, and would be waited for.
        for bucket, step in self._prepared.items():
            if on_compiled is not None:
                on_compiled(bucket, step)
        for bucket in self._policy.common_buckets():
            prepared = self._prepared.get(bucket)
            if prepared is None:
                self.profile(bucket)
            else:
                self._run_full(prepared, bucket)
        return sum(step.bytes for step in self._prepared.values())

    def profile(self, bucket: Bucket) -> None:
        """Runs one step with every token and row of a bucket live, reading the null block."""
        step = self._compile(bucket, capture=False)
        try:
            self._run_full(step, bucket)
        finally:
            step.close()

    # --- steps --------------------------------------------------------------------------

    def execute(self, schedule: SchedulerOutput, on_launch: OnLaunch) -> StepResult:
        """Runs one step.

        Args:
          schedule: its rows.
          on_launch: called when the device has its work, before this waits for it, and also before
            a step is compiled that start-up did not make.

        A draw that the candidates do not cover makes the step run again with a full sort: the
        same K and V go to the same slots, so running twice changes nothing else.

        Raises:
          PlatformError: the device failed.
        """
        assert self._builder is not None
        built = self._builder.build(schedule)
        host = self._run(built.batch, on_launch)
        uncovered = _uncovered(schedule, host)
        if uncovered:
            for request in uncovered:
                request.needs_sort = True
            built = self._builder.build(schedule)
            host = self._run(built.batch, on_launch)
        return read_result(schedule, built, host)

    def drop_late(self) -> bool:
        """Closes the steps that start-up did not prepare; False if none of them holds memory.

        They are made again when they are needed.
        """
        held = any(step.bytes for step in self._late.values())
        if held:
            for step in self._late.values():
                step.close()
            self._late.clear()
        return held

    def scrub(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros, so that what a failed request wrote is gone."""
        if not block_ids or self._spec is None:
            return
        block_size = self._spec.block_size
        for index, layer in enumerate(self._spec.layers):
            shape = (len(block_ids), 2, block_size, layer.num_kv_heads, layer.head_dim)
            zeros = np.zeros(shape, np.float32)
            self._kv[index] = self.backend.kv_write(self._kv[index], block_ids, zeros)

    def close(self) -> None:
        """Frees the KV cache, the steps and the weights."""
        self.release()
        self._weights = {}

    def _run(self, batch: StepBatch, on_launch: OnLaunch) -> dict[str, npt.NDArray[Any]]:
        if batch.bucket not in self._prepared and batch.bucket not in self._late:
            on_launch()  # to compile may take long: nothing that is due waits for it
        step = self._step_for(batch.bucket)
        outputs, self._kv = step.run(batch, self._kv)
        on_launch()
        return {name: self.backend.download(array) for name, array in outputs.items()}

    def _run_full(self, step: CompiledStep, bucket: Bucket) -> None:
        """Runs a step on the null block and waits for it."""
        assert self._spec is not None
        outputs, self._kv = step.run(full_batch(bucket, self._spec.block_size), self._kv)
        for array in outputs.values():
            self.backend.download(array)

    def _step_for(self, bucket: Bucket) -> CompiledStep:
        step = self._prepared.get(bucket)
        if step is not None:
            return step
        step = self._late.get(bucket)
        if step is not None:
            self._late.move_to_end(bucket)
            return step
        return self._compile_late(bucket)

    def _compile_late(self, bucket: Bucket) -> CompiledStep:
        assert self._policy is not None
        step = self._compile(bucket, capture=self._policy.is_padded(bucket))
        self._late[bucket] = step
        if len(self._late) > _MAX_LATE_STEPS:
            self._late.popitem(last=False)[1].close()
        if self.on_late is not None and step.compile_seconds + step.capture_seconds > 0:
            self.on_late(bucket, step)
        return step

    def _compile(self, bucket: Bucket, *, capture: bool) -> CompiledStep:
        return self.backend.compile(self._step, bucket, self._weights, self._kv, capture=capture)


def _uncovered(schedule: SchedulerOutput, host: Mapping[str, npt.NDArray[Any]]) -> list[Request]:
    covered = host.get("covered")
    if covered is None or covered.all():
        return []
    rows = zip(schedule.rows, covered.tolist(), strict=False)  # the batch may be padded
    return [row.request for row, is_covered in rows if row.samples and not is_covered]
