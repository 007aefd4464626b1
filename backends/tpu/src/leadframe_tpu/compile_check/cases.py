"""The steps that a check compiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from leadframe.platform.backend import KVLayerSpec, KVSpec
from leadframe.platform.batch import SampleVariant
from leadframe_tpu.capabilities import HEAD_DIMS
from leadframe_tpu.compile_check.check import StepCase
from leadframe_tpu.compile_check.shapes import (
    BLOCK_SIZE,
    BUCKETS,
    KERNEL_BUCKETS,
    SHAPES,
    WAYS,
    DecoderStep,
    KernelStep,
)

KERNELS: Final = "kernels"
MODELS: Final = (*SHAPES, KERNELS)
STEPS: Final = tuple(BUCKETS)


def decoder_case(model: str, step: str, layers: int | None = None) -> StepCase:
    """The layers of a step of a model shape."""
    shape = SHAPES[model]
    if layers is not None:
        shape = replace(shape, layers=layers)
    return StepCase(
        name=f"{model} {step}",
        build=partial(DecoderStep, shape),
        weights=shape.weights(),
        kv=shape.kv_spec("bfloat16"),
        bucket=BUCKETS[step],
    )


def kernel_case(
    head_dims: tuple[int, ...],
    step: str,
    dtype: str = "bfloat16",
    block_size: int = BLOCK_SIZE,
) -> StepCase:
    """The kernels of one layer for each head dimension."""
    bucket = KERNEL_BUCKETS[step]
    return StepCase(
        name=f"{KERNELS} {step}",
        build=partial(KernelStep, head_dims),
        weights=KernelStep.weights(head_dims, bucket),
        kv=KVSpec(tuple(KVLayerSpec(2, dim) for dim in head_dims), block_size, dtype),
        bucket=bucket,
        dtype=dtype,
        max_ranks=1,
    )


def cases(models: Sequence[str], steps: Sequence[str], layers: int | None) -> Iterator[StepCase]:
    """Lists the programs of some models; "kernels" has a layer for each head dimension."""
    for model in models:
        for step in steps:
            if model == KERNELS:
                yield kernel_case(HEAD_DIMS, step)
                continue
            layered = decoder_case(model, step, layers)
            yield layered
            yield from (head_case(layered, way) for way in WAYS)


def head_case(layered: StepCase, way: SampleVariant) -> StepCase:
    """The head that follows some layers, for a way to sample."""
    name, bucket = f"{layered.name}, {way} head", replace(layered.bucket, sample=way)
    return replace(layered, name=name, bucket=bucket, is_head=True)
