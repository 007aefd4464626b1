"""What the backend can do, and why not where it cannot."""

from __future__ import annotations

from typing import Final

from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe.platform.ops import OP_NAMES

BLOCK_SIZES: Final = (32, 16, 64, 128, 8)
"""Multiples of the eight rows that memory moves by; 32 keeps the number of copies low."""

HEAD_DIMS: Final = (128, 64, 256, 192, 112, 96, 80, 48, 32, 16, 8)
"""Each of these compiles for v5e, v6e and tpu7x and agrees with the reference when interpreted."""

FEATURES: Final = frozenset({"window", "softcap"})

DTYPES: Final = ("bfloat16", "float32")

MAX_PROGRAMS: Final = 24
"""Compiling takes a chip's host half a minute a program. Keys are read as far as a row is long, so
a wide block table costs next to nothing and one width of it will do."""


def capabilities(*, num_devices: int, is_interpreted: bool) -> Capabilities:
    """Returns the static facts.

    Args:
      num_devices: chips that one model may use.
      is_interpreted: kernels run in the interpreter; float32 then comes first, because hosts
        emulate bfloat16.
    """
    dtypes = DTYPES[::-1] if is_interpreted else DTYPES
    return Capabilities(
        family="jax",
        compute_dtypes=dtypes,
        kv_dtypes=dtypes,
        block_sizes=BLOCK_SIZES,
        head_dims=HEAD_DIMS,
        attention_features=FEATURES,
        graph="compile",
        static_shapes=True,
        deterministic=True,
        max_graphs=MAX_PROGRAMS,
        tensor_parallel=num_devices,
        plain_weights=True,
        asynchronous=not is_interpreted,
        simulated="interpreter" if is_interpreted else "",
        why_not=why_not,
    )


def why_not(spec: OpSpec) -> str | None:
    """Returns a reason why an op cannot be served, or None."""
    if spec.op not in OP_NAMES:
        return f"there is no op {spec.op!r}"
    unknown = sorted(spec.features - FEATURES)
    if unknown:
        return f"attention feature {unknown[0]!r} is not known; there are window and softcap"
    for dtype in (spec.dtype, spec.kv_dtype):
        if dtype is not None and dtype not in DTYPES:
            return f"dtype {dtype} is not implemented; TPUs compute in {' and '.join(DTYPES)}"
    if spec.head_dim is not None and spec.head_dim not in HEAD_DIMS:
        proved = ", ".join(str(dim) for dim in sorted(HEAD_DIMS))
        return f"head dim {spec.head_dim} is not proved; these are: {proved}"
    if spec.block_size is not None and spec.block_size not in BLOCK_SIZES:
        return f"block size {spec.block_size} is not one of {BLOCK_SIZES}"
    return None
