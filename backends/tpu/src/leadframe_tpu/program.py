"""Programs: functions that are lowered for a bucket and compiled ahead of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from leadframe.platform.backend import KV, Array, SplitStep, StepFunction
from leadframe.platform.batch import (
    Bucket,
    StepBatch,
    forward_bucket,
    head_arrays,
    packed_sizes,
    unpack,
)
from leadframe_tpu.cache import cache_hits, is_cache_used
from leadframe_tpu.kernels.layout import KVBlocks
from leadframe_tpu.layer_ops import take_rows
from leadframe_tpu.ranks import KV_SPEC, Ranks

_NOTHING = PartitionSpec()

HIDDEN, ROWS = "hidden", "rows"
"""What the layers of a step return: hidden states of every token, and of the sampling rows."""


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

    batch = [_held((num_ints,), jnp.int32, ranks), _held((num_floats,), jnp.float32, ranks)]
    return _lower(run, weights, kv, batch, ranks, platform)


def lower_forward(
    step: SplitStep,
    bucket: Bucket,
    weights: Mapping[str, Any],
    kv: Sequence[KVBlocks],
    ranks: Ranks,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """Lowers the layers of a step, for every bucket with the same `forward_bucket`.

    Its ints are what `layer_ints` makes; it returns `HIDDEN` and `ROWS`.
    """
    sizes = forward_bucket(bucket)
    num_ints, _ = packed_sizes(sizes)

    def run(weights: Mapping[str, Array], kv_d: KV, ints: jax.Array) -> tuple[Any, KV]:
        hidden, kv = step.forward(weights, kv_d, unpack(sizes, ints[:num_ints], None))
        ids = ints[num_ints:]
        rows = {name: take_rows(array, ids) for name, array in hidden.items()}
        return {HIDDEN: hidden, ROWS: rows}, kv

    batch = [_held((num_ints + bucket.num_seqs,), jnp.int32, ranks)]
    return _lower(run, weights, kv, batch, ranks, platform)


def lower_head(
    step: SplitStep,
    bucket: Bucket,
    weights: Mapping[str, Any],
    hidden: Mapping[str, Any],
    ranks: Ranks,
    platform: str | None = None,
) -> jax.stages.Lowered:
    """Lowers the head of a step, for every bucket with the same `head_bucket`.

    Args:
      step: the step.
      bucket: the static sizes of the step.
      weights: as in `lower_step`.
      hidden: what `taken` chose; the same.
      ranks: the devices.
      platform: as in `lower_step`.
    """
    num_ints = _sizes(bucket)[1]

    def run(weights: Mapping[str, Array], hidden: Mapping[str, Array], tail: jax.Array) -> Any:
        floats = jax.lax.bitcast_convert_type(tail[num_ints:], jnp.float32)
        arrays = head_arrays(bucket, tail[:num_ints], floats)
        if _takes_rows(bucket):
            count = jnp.arange(bucket.num_logits, dtype=jnp.int32)
            arrays = replace(arrays, logits_idx=count)
        return step.head(weights, hidden, arrays)

    tail = _held((num_ints + packed_sizes(bucket)[1],), jnp.int32, ranks)
    return _lower(run, weights, None, [hidden, tail], ranks, platform)


def _takes_rows(bucket: Bucket) -> bool:
    """Whether its head reads the sampling rows alone, so that it does not depend on the tokens."""
    return bucket.num_logits == bucket.num_seqs


def taken(bucket: Bucket, outputs: Any) -> Any:
    """Returns what a head reads of what the layers return: the sampling rows where they suffice."""
    return outputs[ROWS if _takes_rows(bucket) else HIDDEN]


def resting(shapes: Any, ranks: Ranks) -> Any:
    """Returns descriptions of arrays of some shapes that every rank holds."""
    return jax.tree.map(lambda of: _held(of.shape, of.dtype, ranks), shapes)


def layer_ints(batch: StepBatch) -> npt.NDArray[np.int32]:
    """Copies what the layers of a step read: its ints, then the token of each sampling row."""
    num_ints, _ = _sizes(batch.bucket)
    rows = batch.bucket.num_seqs
    ints = np.zeros(num_ints + rows, np.int32)
    known = batch.ints[: num_ints + min(rows, batch.bucket.num_logits)]
    ints[: len(known)] = known
    return ints


def head_ints(batch: StepBatch) -> npt.NDArray[np.int32]:
    """Copies what the head of a step reads, the bits of the floats last: one buffer to send."""
    num_ints, _ = _sizes(batch.bucket)
    return np.concatenate([batch.ints[num_ints:], batch.floats.view(np.int32)])


def _sizes(bucket: Bucket) -> tuple[int, int]:
    """Returns how many of a step's ints its layers read, and how many its head."""
    num_layer_ints, _ = packed_sizes(forward_bucket(bucket))
    return num_layer_ints, packed_sizes(bucket)[0] - num_layer_ints


def _held(shape: tuple[int, ...], dtype: Any, ranks: Ranks) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=ranks.replicated)


def _lower(
    run: Callable[..., Any],
    weights: Mapping[str, Any],
    kv: Sequence[KVBlocks] | None,
    others: Sequence[Any],
    ranks: Ranks,
    platform: str | None,
) -> jax.stages.Lowered:
    """Lowers a function of weights, of a KV cache if there is one, and of replicated arrays."""
    given = [dict(weights), *([] if kv is None else [list(kv)]), *others]
    if ranks.count > 1:
        own = {name: _spec(array) for name, array in weights.items()}
        cached = [] if kv is None else [KV_SPEC]
        run = jax.shard_map(
            run,
            mesh=ranks.mesh,
            in_specs=(own, *cached, *(_NOTHING for _ in others)),
            out_specs=_NOTHING if kv is None else (_NOTHING, KV_SPEC),
            check_vma=False,  # logits leave replicated, which the checker cannot see
        )
    donated = () if kv is None else (1,)
    with jax.set_mesh(ranks.mesh):  # kernels ask it what kind of chip they are compiled for
        traced = jax.jit(run, donate_argnums=donated).trace(*given)
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
      outputs: the part of it that outlives the run.
      arguments: weights, KV and inputs.
      donated: the part of the arguments that the outputs reuse.
    """

    code: int
    scratch: int
    outputs: int
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
            outputs=stats.output_size_in_bytes - alias,
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
