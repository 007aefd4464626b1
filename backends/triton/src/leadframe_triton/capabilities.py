"""What the Triton backends claim for a chip. Nothing here imports Triton or torch."""

from __future__ import annotations

from typing import Final, Literal

from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe_triton.arch import Arch
from leadframe_triton.tiles import MAX_HEAD_DIM

GraphKind = Literal["none", "record", "compile"]

FEATURES: Final = frozenset({"window", "softcap"})
HEAD_DIMS: Final = tuple(range(8, MAX_HEAD_DIM + 1, 8))
BLOCK_SIZES: Final = (16, 32, 64, 128, 8, 4)
"""The kernels look every key up, so that any block size will do; small ones cost more loads."""

_DTYPES: Final = ("bfloat16", "float16", "float32")
_INTERPRETED: Final = ("float32", "float16")
"""Triton's interpreter does integer arithmetic on bfloat16: silently wrong."""


def capabilities(
    arch: Arch, *, batch_invariant: bool = False, graph: GraphKind = "record"
) -> Capabilities:
    """Returns the capabilities of a backend.

    Args:
      arch: the chip, or the interpreter.
      batch_invariant: the backend runs in batch-invariant mode.
      graph: what `compile` makes of a step.
    """
    is_interpreted = arch.vendor == "none"
    dtypes = _INTERPRETED if is_interpreted else _DTYPES
    kv_dtypes = (*dtypes, *arch.fp8)

    def why_not(spec: OpSpec) -> str | None:
        return _why_not(spec, arch, dtypes, kv_dtypes)

    return Capabilities(
        family="torch",
        compute_dtypes=dtypes,
        kv_dtypes=kv_dtypes,
        block_sizes=BLOCK_SIZES,
        head_dims=HEAD_DIMS,
        attention_features=FEATURES,
        graph=graph,
        deterministic=True,
        batch_invariant=batch_invariant,
        plain_weights=True,
        asynchronous=not is_interpreted,
        simulated="interpreter" if is_interpreted else "",
        why_not=why_not,
    )


def _why_not(
    spec: OpSpec, arch: Arch, dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...]
) -> str | None:
    unknown = sorted(spec.features - FEATURES)
    if unknown:
        return f"the Triton kernels have no {' or '.join(unknown)}; they have window and softcap"
    if spec.dtype not in dtypes:
        return f"dtype {spec.dtype} is not among {', '.join(dtypes)} on {arch.name}"
    if spec.kv_dtype is not None and spec.kv_dtype not in kv_dtypes:
        return f"KV dtype {spec.kv_dtype} is not among {', '.join(kv_dtypes)} on {arch.name}"
    if spec.block_size is not None and spec.block_size not in BLOCK_SIZES:
        return f"block size {spec.block_size} is not among {', '.join(map(str, BLOCK_SIZES))}"
    if spec.head_dim is not None and spec.head_dim not in HEAD_DIMS:
        return f"head dim {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads and kv_heads and heads % kv_heads:
        return f"{heads} query heads do not divide among {kv_heads} KV heads"
    return None
