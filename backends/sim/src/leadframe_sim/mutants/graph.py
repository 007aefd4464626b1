"""Group D: recordings and executables that go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from leadframe.platform import KV, Bucket, CompiledStep, StepBatch, StepFunction
from leadframe_sim.backend import SimBackend
from leadframe_sim.device import SimArray
from leadframe_sim.mutants.base import Mutant, sim_backend
from leadframe_sim.steps import PlainStep, RecordedStep

Outputs = dict[str, Any]


class _Stale(RecordedStep):
    """Keeps a part of the first batch that it sees."""

    part = slice(None)

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        first = getattr(self, "first", None)
        if first is None:
            self.first = batch.ints.copy()
        else:
            batch.ints[self.part] = first[self.part]
        return super().run(batch, kv_d)


class _StaleTable(_Stale):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        b = self.bucket
        start = 2 * b.num_seqs + 1
        self.part = slice(start, start + b.num_seqs * b.num_blocks)
        return super().run(batch, kv_d)


class _StaleLengths(_Stale):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        b = self.bucket
        self.part = slice(b.num_seqs + 1, 2 * b.num_seqs + 1)
        return super().run(batch, kv_d)


class _StaleSlots(_Stale):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        b = self.bucket
        start = 2 * b.num_seqs + 1 + b.num_seqs * b.num_blocks
        self.part = slice(start, start + b.num_tokens)
        return super().run(batch, kv_d)


class _Retraces(RecordedStep):
    """Captures again on every run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.args = args

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        return RecordedStep(*self.args).run(batch, kv_d)


class _Grows(RecordedStep):
    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        spare = self.device.allocate(np.zeros(4096, np.float32))
        self.kept = [*getattr(self, "kept", []), spare]
        return super().run(batch, kv_d)


class _HidesBytes(RecordedStep):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hidden = self.device.allocate(np.zeros(1 << 18, np.float32))
        self.bytes = 0


class _NeverFrees(RecordedStep):
    def close(self) -> None:
        self.device.kept = [*getattr(self.device, "kept", []), self.program]  # type: ignore[attr-defined]


class _LazyBatch(PlainStep):
    """Lets the device read the host's buffer after `run` has returned."""

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[Outputs, KV]:
        outputs, kv = super().run(batch, kv_d)
        held = batch.ints
        original = held.copy()
        device = self.device
        synchronize = device.synchronize

        def late() -> None:
            device.synchronize = synchronize  # type: ignore[method-assign]
            if not np.array_equal(held, original):
                for array in outputs.values():
                    device.buffer(array)[...] += 1
            synchronize()

        device.synchronize = late  # type: ignore[method-assign]
        return outputs, kv


class _Sim(SimBackend):
    """A simulated backend with another kind of step."""

    step_type: Any = RecordedStep

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        compiled: CompiledStep = self.step_type(self.device, step, bucket, weights, kv)
        return compiled


def _with(step_type: Any) -> Any:
    return lambda: sim_backend(type("Broken", (_Sim,), {"step_type": step_type}))


class _DirtyCompile(_Sim):
    """Captures with a batch that writes to real blocks."""

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        compiled = super().compile(*args, **kwargs)
        self.device.buffer(args[3][0])[1] = 0.5
        return compiled


class _SharedOutput(_Sim):
    """Overwrites the last step's outputs as soon as anything else is uploaded."""

    def upload(self, *args: Any, **kwargs: Any) -> SimArray:
        array = super().upload(*args, **kwargs)
        last = getattr(self, "last", None)
        if last is not None and last.outputs:
            for output in last.outputs.values():
                self.device.buffer(output)[...] = 0
        return array

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        self.last = compiled = super().compile(*args, **kwargs)
        return compiled


class _SharedBuffers(_Sim):
    """Two buckets of one backend read the input buffers of the later one."""

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        compiled: Any = super().compile(*args, **kwargs)
        steps = self.__dict__.setdefault("steps", [])
        for other in steps:
            other.program = compiled.program
            other.outputs = compiled.outputs
        steps.append(compiled)
        return compiled  # type: ignore[no-any-return]


class _FewSteps(_Sim):
    """Has room for eight recordings, and says nothing when a ninth takes the first one's."""

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        compiled: Any = super().compile(*args, **kwargs)
        steps = self.__dict__.setdefault("steps", [])
        steps.append(compiled)
        if len(steps) > 8:
            steps[-9].program, steps[-9].outputs = compiled.program, compiled.outputs
        return compiled  # type: ignore[no-any-return]


class _Unsynchronised(SimBackend):
    """Downloads without waiting for the queue."""

    def download(self, array: SimArray) -> Any:
        return self.device.peek(array)


class _LazySim(_Sim):
    def compile(self, step: Any, bucket: Any, weights: Any, kv: Any, capture: bool = True) -> Any:
        return _LazyBatch(self.device, step, bucket, weights)


MUTANTS = [
    Mutant("stale-table", "D", "replays with the block table of the first run", _with(_StaleTable)),
    Mutant("stale-lengths", "D", "replays with the lengths of the first run", _with(_StaleLengths)),
    Mutant("stale-slots", "D", "replays with the slots of the first run", _with(_StaleSlots)),
    Mutant("retraces", "D", "compiles again on every run", _with(_Retraces)),
    Mutant("grows-per-replay", "D", "keeps 16 KiB for each replay", _with(_Grows)),
    Mutant("hides-bytes", "D", "a step's bytes are reported as 0", _with(_HidesBytes)),
    Mutant("steps-never-freed", "D", "close keeps the recording", _with(_NeverFrees)),
    Mutant(
        "dirty-compile", "D", "compile writes to a real block", lambda: sim_backend(_DirtyCompile)
    ),
    Mutant(
        "shared-output",
        "D",
        "an upload overwrites a step's outputs",
        lambda: sim_backend(_SharedOutput),
    ),
    Mutant(
        "shared-buffers", "D", "buckets share one recording", lambda: sim_backend(_SharedBuffers)
    ),
    Mutant(
        "few-steps",
        "D",
        "the ninth compiled step takes the place of the first",
        lambda: sim_backend(_FewSteps),
        tier="full",
    ),
    Mutant(
        "lazy-batch",
        "D",
        "reads the batch after run has returned",
        lambda: sim_backend(_LazySim, "none"),
    ),
    Mutant(
        "unsynchronised",
        "B",
        "downloads without waiting for the queue",
        lambda: sim_backend(_Unsynchronised),
    ),
]
