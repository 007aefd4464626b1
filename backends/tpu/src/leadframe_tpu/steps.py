"""Steps that are ready to run, and the programs that they share.

The layers of a step and its head are programs of their own. Buckets that differ only in how they
sample share the layers; buckets that differ only in tokens and block tables share the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any
from weakref import WeakValueDictionary

import jax

from leadframe.platform.backend import KV, Array, SplitStep, StepFunction
from leadframe.platform.batch import Bucket, StepBatch, forward_bucket, head_bucket
from leadframe_tpu.failures import compile_errors, device_errors
from leadframe_tpu.memory import Ledger
from leadframe_tpu.program import (
    Program,
    compile_lowered,
    head_ints,
    layer_ints,
    lower_forward,
    lower_head,
    lower_step,
    resting,
    taken,
)
from leadframe_tpu.ranks import Ranks


class SharedProgram:
    """A program that may be compiling still, and its users.

    Attributes:
      outputs: shapes of what it returns.
      num_users: steps that hold it.

    Args:
      made_of: what it was lowered from, kept alive so that its identity tells programs apart.
      pending: the program.
      outputs: shapes of what it returns.
    """

    def __init__(self, made_of: tuple[Any, ...], pending: Future[Program], outputs: Any) -> None:
        self._made_of, self._pending, self.outputs = made_of, pending, outputs
        self.num_users = 0

    def result(self) -> Program:
        """Waits for the compiler and returns the program, or raises what compiling raised."""
        return self._pending.result()

    @property
    def is_live(self) -> bool:
        """Whether another step may share it: somebody holds it, and it has not failed."""
        pending = self._pending
        has_failed = pending.done() and (pending.cancelled() or pending.exception() is not None)
        return self.num_users > 0 and not has_failed

    def release(self) -> None:
        """Takes a user off; without any, it is compiled no more."""
        self.num_users -= 1
        if not self.num_users:
            self._pending.cancel()


class Programs:
    """The programs of a backend.

    Args:
      ranks: the devices.
      compilers: threads that compile.
      options: of XLA.
    """

    def __init__(
        self, ranks: Ranks, compilers: Executor, options: Mapping[str, Any] | None
    ) -> None:
        self._ranks, self._compilers, self._options = ranks, compilers, options
        self._live: WeakValueDictionary[tuple[Any, ...], SharedProgram] = WeakValueDictionary()

    def whole(
        self, step: StepFunction, bucket: Bucket, weights: Mapping[str, Array], kv: KV
    ) -> SharedProgram:
        """Compiles a step that does not say where its layers end; nobody shares it."""
        return self._compile((), lambda: lower_step(step, bucket, weights, kv, self._ranks))

    def forward(
        self, step: SplitStep, bucket: Bucket, weights: Mapping[str, Array], kv: KV
    ) -> SharedProgram:
        """Returns the layers of a step for the sizes of a bucket and of a cache."""
        return self._share(
            (step, weights),
            (forward_bucket(bucket), _form(kv)),
            lambda: lower_forward(step, bucket, weights, kv, self._ranks),
        )

    def head(
        self, step: SplitStep, bucket: Bucket, weights: Mapping[str, Array], outputs: Any
    ) -> SharedProgram:
        """Returns the head of a step for what its layers return."""
        hidden = resting(taken(bucket, outputs), self._ranks)
        return self._share(
            (step, weights),
            (head_bucket(bucket), _form(hidden)),
            lambda: lower_head(step, bucket, weights, hidden, self._ranks),
        )

    def _share(
        self,
        made_of: tuple[Any, ...],
        sizes: tuple[Any, ...],
        lower: Callable[[], jax.stages.Lowered],
    ) -> SharedProgram:
        key = (*map(id, made_of), *sizes)
        known = self._live.get(key)
        if known is None or not known.is_live:
            known = self._live[key] = self._compile(made_of, lower)
        return known

    def _compile(
        self, made_of: tuple[Any, ...], lower: Callable[[], jax.stages.Lowered]
    ) -> SharedProgram:
        start = time.perf_counter()
        lowered = lower()
        seconds = time.perf_counter() - start
        pending = self._compilers.submit(compile_lowered, lowered, self._options, seconds)
        return SharedProgram(made_of, pending, lowered.out_info)


def _form(tree: Any) -> tuple[Any, ...]:
    """Returns what tells programs for one kind of arrays from those for another."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


class TpuStep:
    """A step with its weights. It satisfies `leadframe.platform.CompiledStep`.

    It may be compiling still: to run it, or to ask what it took, is to wait for that.

    Args:
      bucket: its sizes.
      forward: the layers, or the whole step.
      head: None where `forward` is the whole step.
      weights: what the step reads.
      ranks: the devices.
      ledger: where its scratch is counted.
      free: bytes that are free.
    """

    capture_seconds = 0.0
    """Nothing is captured."""

    def __init__(
        self,
        bucket: Bucket,
        forward: SharedProgram,
        head: SharedProgram | None,
        weights: Mapping[str, Array],
        ranks: Ranks,
        ledger: Ledger,
        free: Callable[[], int],
    ) -> None:
        self._bucket, self._weights, self._ranks = bucket, dict(weights), ranks
        self._ledger, self._free = ledger, free
        self._held = [forward] if head is None else [forward, head]
        self._is_new = [not program.num_users for program in self._held]
        for program in self._held:
            program.num_users += 1
        self._programs: list[Program] = []
        self._bytes = 0
        self._is_closed = False

    @property
    def bytes(self) -> int:
        """Device memory that it adds to the steps made before it."""
        self._finished()
        return self._bytes

    @property
    def compile_seconds(self) -> float:
        """Tracing, lowering and compiling what no step had before it; programs overlap."""
        return sum(program.seconds for program in self._own())

    @property
    def cache_hit(self) -> bool | None:
        """Whether the cache on disk served all that was compiled; None without one."""
        hits = [program.cache_hit for program in self._own()]
        return None if None in hits or not hits else all(hits)

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Array], KV]:
        """Starts the step on a batch, and returns what it will produce."""
        programs = self._programs or self._finished()
        with device_errors("step", 0, self._free):
            if len(programs) == 1:
                # Copied: the caller fills its buffers again while the transfer may be under way.
                packed = batch.ints.copy(), batch.floats.copy()
                outputs, kv = programs[0].compiled(self._weights, list(kv_d), *packed)
            else:
                outputs, kv = self._run_apart(batch, kv_d)
            for array in outputs.values():  # all on their way before the first is waited for
                array.copy_to_host_async()
        return outputs, kv

    def _run_apart(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Array], KV]:
        forward, head = (program.compiled for program in self._programs)
        hidden, kv = forward(self._weights, list(kv_d), layer_ints(batch))
        try:
            outputs = head(self._weights, taken(self._bucket, hidden), head_ints(batch))
        except Exception:
            kv_d[:] = kv  # the old arrays are gone, and the caller may try again
            raise
        return outputs, kv

    def close(self) -> None:
        """Lets go of the weights, and of the programs, which others may share."""
        if not self._is_closed:
            for program in self._held:
                program.release()
        self._held, self._programs, self._weights, self._is_closed = [], [], {}, True

    def _own(self) -> list[Program]:
        """The programs that were compiled for this step."""
        programs = self._finished()
        return [one for one, is_new in zip(programs, self._is_new, strict=True) if is_new]

    def _finished(self) -> list[Program]:
        """Waits for the compiler, the first time, and counts what the programs take.

        Raises:
          CompileError: it could not be compiled.
          DeviceOOM: the chip has no room for it.
        """
        assert not self._is_closed, "the step is closed"
        if not self._programs:
            with compile_errors(self._bucket, self._free):
                self._programs = [program.result() for program in self._held]
            # Programs add up; scratch does not, since one of them runs at a time.
            code = sum(program.memory.code for program in self._own())
            growth = self._ledger.share_scratch(self._scratch() * self._ranks.count)
            self._bytes = code * self._ranks.count + growth
        return self._programs

    def _scratch(self) -> int:
        """Bytes on each device while it runs; hidden states outlive the layers until the head."""
        forward = self._programs[0].memory
        if len(self._programs) == 1:
            return forward.scratch
        return max(forward.scratch, forward.outputs + self._programs[1].memory.scratch)
