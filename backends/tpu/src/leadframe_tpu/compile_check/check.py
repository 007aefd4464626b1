"""Compiles one program of a step for one target and judges it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Literal, cast

import jax
import jax.numpy as jnp

from leadframe.errors import Unsupported
from leadframe.platform.backend import KVSpec, SplitStep, StepFunction
from leadframe.platform.batch import Bucket
from leadframe.platform.ops import Ops
from leadframe_tpu.compile_check.gate import Expectation, lowering_problems, problems_of
from leadframe_tpu.compile_check.shapes import Weight
from leadframe_tpu.compile_check.targets import Chip, Target
from leadframe_tpu.failures import first_line
from leadframe_tpu.kernels.layout import KVBlocks
from leadframe_tpu.kv_cache import block_bytes, layer_shape
from leadframe_tpu.op_table import make_ops
from leadframe_tpu.program import (
    ProgramMemory,
    lower_forward,
    lower_head,
    lower_step,
    resting,
    taken,
)
from leadframe_tpu.ranks import Ranks

LAYER_BYTES: Final = 512 << 20
"""A layer's cache in a check: so large that a copy of it cannot hide among the activations."""

_XLA_NAMES: Final = {"bfloat16": "bf16", "float32": "f32"}

Level = Literal["compiled", "lowered", "not applicable"]


@dataclass(frozen=True, slots=True)
class StepCase:
    """One program to compile: of a `SplitStep` its layers or its head, else the whole step.

    Attributes:
      name: what it is called in the table.
      build: makes the step over an op table.
      weights: what it reads.
      kv: its cache.
      bucket: its sizes.
      dtype: of weights and activations.
      max_ranks: most devices that can share it; None is any number.
      is_head: the head of a `SplitStep`, and not its layers.
    """

    name: str
    build: Callable[[Ops], StepFunction]
    weights: Mapping[str, Weight]
    kv: KVSpec
    bucket: Bucket
    dtype: str = "bfloat16"
    max_ranks: int | None = None
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What one device does in a step, a kernel as it declares itself for half-full block tables.

    Attributes:
      flops: operations.
      bytes_moved: bytes to and from memory.
      least_seconds: the shortest time that the chip's peaks allow.
    """

    flops: float
    bytes_moved: float
    least_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a step came out.

    Attributes:
      case: its name.
      target: for what it was compiled.
      ranks: devices that share it.
      level: "lowered" is weaker than "compiled".
      problems: what is wrong, or why it does not apply; empty is good.
      seconds: processor time of lowering and compiling.
      memory: bytes on each device; None unless compiled.
      cost: None unless compiled.
    """

    case: str
    target: str
    ranks: int
    level: Level
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    memory: ProgramMemory | None = None
    cost: Cost | None = None
    text: str = field(default="", repr=False)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong; a case that does not apply is."""
        return not self.problems or self.level == "not applicable"


def check_step(case: StepCase, target: Target, num_ranks: int) -> Verdict:
    """Compiles a step, or lowers it where the target cannot compile, and judges it."""
    start = time.process_time()
    ranks = Ranks(target.devices[:num_ranks])
    level: Level = "lowered" if target.chip is None else "compiled"
    try:
        weights, kv = _abstract(case, ranks)
        lowered = _lower(case, ranks, weights, kv, level)
        if target.chip is None:
            problems = lowering_problems(lowered.as_text(), 0 if case.is_head else len(kv))
            return Verdict(case.name, target.name, num_ranks, level, tuple(problems))
        compiled = lowered.compile()
    except Unsupported as error:
        return Verdict(case.name, target.name, num_ranks, "not applicable", (error.reason,))
    except Exception as error:  # a verdict, whatever tracing, lowering or Mosaic raised
        problem = f"{type(error).__name__}: {first_line(str(error))}"
        return Verdict(case.name, target.name, num_ranks, level, (problem,))
    memory, text = ProgramMemory.of(compiled), compiled.as_text() or ""
    problems = problems_of(text, memory, expectation(case, ranks, target.chip, kv))
    return Verdict(
        case.name,
        target.name,
        num_ranks,
        level,
        tuple(problems),
        time.process_time() - start,
        memory,
        _cost(compiled, target.chip),
        text,
    )


def _abstract(
    case: StepCase, ranks: Ranks
) -> tuple[dict[str, jax.ShapeDtypeStruct], list[KVBlocks]]:
    """Descriptions of the weights and of the cache."""
    weights = {}
    for name, weight in case.weights.items():
        place = ranks.placement(weight.shape, weight.partition, weight.role)
        dtype = jnp.dtype(weight.dtype or case.dtype)
        weights[name] = jax.ShapeDtypeStruct(place.shape, dtype, sharding=place.where)
    num_blocks = LAYER_BYTES * len(case.kv.layers) // block_bytes(case.kv, ranks)
    kv = []
    for layer in case.kv.layers:
        shape = layer_shape(case.kv, layer, num_blocks, ranks)
        data: Any = jax.ShapeDtypeStruct(
            shape, jnp.dtype(case.kv.dtype), sharding=ranks.kv_sharding
        )
        kv.append(KVBlocks(data, layer.head_dim, layer.num_kv_heads))
    return weights, kv


def _lower(
    case: StepCase,
    ranks: Ranks,
    weights: Mapping[str, jax.ShapeDtypeStruct],
    kv: list[KVBlocks],
    level: Level,
) -> jax.stages.Lowered:
    ops = cast(Ops, SimpleNamespace(**make_ops(interpret=False, num_ranks=ranks.count)))
    platform = "tpu" if level == "lowered" else None
    step = case.build(ops)
    if not isinstance(step, SplitStep):
        return lower_step(step, case.bucket, weights, kv, ranks, platform)
    layers = lower_forward(step, case.bucket, weights, kv, ranks, platform)
    if not case.is_head:
        return layers
    hidden = resting(taken(case.bucket, layers.out_info[0]), ranks)
    return lower_head(step, case.bucket, weights, hidden, ranks, platform)


def expectation(case: StepCase, ranks: Ranks, chip: Chip, kv: list[KVBlocks]) -> Expectation:
    """What the compiled step must look like."""
    elements = tuple(layer.data.size // ranks.count for layer in kv)
    item = jnp.dtype(case.kv.dtype).itemsize
    layers, is_shared = 0 if case.is_head else len(kv), ranks.count > 1
    return Expectation(
        kernels={"kv_append": layers, "paged_attention": layers},
        cache_dtype=_XLA_NAMES[case.kv.dtype],
        cache_elements=elements,
        cache_bytes=sum(elements) * item,
        hbm_bytes=chip.hbm_bytes,
        has_cache=not case.is_head,
        all_reduces=2 * layers if is_shared else 0,
        all_gathers=1 if is_shared and case.is_head else 0,
    )


def _cost(compiled: jax.stages.Compiled, chip: Chip) -> Cost:
    found: Mapping[str, float] = compiled.cost_analysis() or {}
    flops, moved = found.get("flops", 0.0), found.get("bytes accessed", 0.0)
    return Cost(flops, moved, max(flops / chip.flops, moved / chip.bandwidth))
