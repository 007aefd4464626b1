"""One step as a program: lowered for a bucket, compiled ahead of time, run with donated KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from leadframe.platform.backend import KV, Array, StepFunction
from leadframe.platform.batch import Bucket, StepBatch, packed_sizes, unpack
from leadframe_tpu.cache import cache_hits, is_cache_used
from leadframe_tpu.failures import compile_errors, device_errors
from leadframe_tpu.kernels.layout import KVBlocks
from leadframe_tpu.memory import Ledger
from leadframe_tpu.ranks import KV_SPEC, Ranks

_NOTHING = PartitionSpec()


def lower_step(
    step: StepFunction,
    bucket: Bucket,
    weights: Mapping[str, Any],
    kv: Sequence[KVBlocks],
    ranks: Ranks,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """Traces a step for a bucket and lowers it for the devices of the ranks.

    Args:
      step: the pure function.
      bucket: its static sizes.
      weights: arrays, or `jax.ShapeDtypeStruct`s with shardings where there is no device.
      kv: the same, one entry a layer; donated.
      ranks: the devices.
      platform: lowers for another platform than the devices', which cannot be compiled then.
    """
    num_ints, num_floats = packed_sizes(bucket)

    def run(
        weights: Mapping[str, Array], kv_d: KV, ints: jax.Array, floats: jax.Array
    ) -> tuple[dict[str, Array], KV]:
        return step(weights, kv_d, unpack(bucket, ints, floats))

    if ranks.count > 1:
        own = {name: _spec(array) for name, array in weights.items()}
        run = jax.shard_map(
            run,
            mesh=ranks.mesh,
            in_specs=(own, KV_SPEC, _NOTHING, _NOTHING),
            out_specs=(_NOTHING, KV_SPEC),
            check_vma=False,  # logits leave replicated, which the checker cannot see
        )
    inputs = [
        jax.ShapeDtypeStruct((size,), dtype, sharding=ranks.replicated)
        for size, dtype in ((num_ints, jnp.int32), (num_floats, jnp.float32))
    ]
    with jax.set_mesh(ranks.mesh):  # kernels ask it what kind of chip they are compiled for
        traced = jax.jit(run, donate_argnums=(1,)).trace(dict(weights), list(kv), *inputs)
        platforms = None if platform is None else (platform,)
        lowered: jax.stages.Lowered = traced.lower(lowering_platforms=platforms)
    return lowered


def _spec(array: Any) -> PartitionSpec:
    sharding = array.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else _NOTHING


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What a compiled program needs on each device, in bytes.

    Attributes:
      code: the program itself, held as long as it lives.
      scratch: temporaries and outputs, held while it runs.
      arguments: weights, KV and inputs.
      donated: the part of the arguments that the outputs reuse.
    """

    code: int
    scratch: int
    arguments: int
    donated: int

    @staticmethod
    def of(compiled: jax.stages.Compiled) -> ProgramMemory:
        """Reads it from the compiler."""
        stats: Any = compiled.memory_analysis()
        alias = stats.alias_size_in_bytes
        return ProgramMemory(
            code=stats.generated_code_size_in_bytes,
            scratch=stats.temp_size_in_bytes + stats.output_size_in_bytes - alias,
            arguments=stats.argument_size_in_bytes,
            donated=alias,
        )

    @property
    def total(self) -> int:
        """Everything that must fit while it runs."""
        return self.code + self.scratch + self.arguments


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program and how it came about."""

    compiled: jax.stages.Compiled
    memory: ProgramMemory
    seconds: float
    cache_hit: bool | None


def compile_lowered(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None, lower_seconds: float
) -> Program:
    """Compiles a step that was lowered; in a thread of its own, if need be."""
    start, hits = time.perf_counter(), cache_hits()
    compiled = lowered.compile(compiler_options=dict(options) if options else None)
    hit = cache_hits() > hits if is_cache_used() else None
    seconds = lower_seconds + time.perf_counter() - start
    return Program(compiled, ProgramMemory.of(compiled), seconds, hit)


class TpuStep:
    """A step with its weights. It satisfies `leadframe.platform.CompiledStep`.

    It may be compiling still: to run it, or to ask what it took, is to wait for that.

    Args:
      bucket: its sizes.
      pending: the program.
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
        pending: Future[Program],
        weights: Mapping[str, Array],
        ranks: Ranks,
        ledger: Ledger,
        free: Callable[[], int],
    ) -> None:
        self._bucket, self._pending = bucket, pending
        self._weights, self._ranks, self._ledger, self._free = dict(weights), ranks, ledger, free
        self._program: Program | None = None
        self._bytes = 0
        self._is_closed = False

    @property
    def bytes(self) -> int:
        """Device memory that it adds to the steps made before it."""
        self._finished()
        return self._bytes

    @property
    def compile_seconds(self) -> float:
        """Tracing, lowering and compiling."""
        return self._finished().seconds

    @property
    def cache_hit(self) -> bool | None:
        """Whether the cache on disk served the compilation; None without one."""
        return self._finished().cache_hit

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Array], KV]:
        """Starts the step on a batch, and returns what it will produce."""
        compiled = (self._program or self._finished()).compiled
        # Copied: the caller fills its buffers again while the transfer may be under way.
        ints, floats = np.array(batch.ints), np.array(batch.floats)
        with device_errors("step", 0, self._free):
            outputs, kv = compiled(self._weights, list(kv_d), ints, floats)
            for array in outputs.values():  # all on their way before the first is waited for
                array.copy_to_host_async()
        return outputs, kv

    def close(self) -> None:
        """Drops the program and the weights."""
        self._pending.cancel()
        self._program, self._weights, self._is_closed = None, {}, True

    def _finished(self) -> Program:
        """Waits for the compiler, the first time, and counts what the program takes.

        Raises:
          CompileError: it could not be compiled.
          DeviceOOM: the chip has no room for it.
        """
        assert not self._is_closed, "the step is closed"
        if self._program is None:
            with compile_errors(self._bucket, self._free):
                self._program = self._pending.result()
            # Programs add up; scratch does not, since one of them runs at a time.
            memory, count = self._program.memory, self._ranks.count
            growth = self._ledger.share_scratch(memory.scratch * count)
            self._bytes = memory.code * count + growth
        return self._program
