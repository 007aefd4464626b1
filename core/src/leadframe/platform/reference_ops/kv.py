"""Reference KV cache: one array a layer, [N, block_size, 2 * K, D].

All heads' K stand before all heads' V. One fused array keeps the scatter a plain two-index
write, which compilers do in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.platform.batch import StepArrays
from leadframe.platform.reference_ops.context import Array, Context


def plan(c: Context, batch: StepArrays, params: Any) -> StepArrays:
    """Returns the batch: the references need nothing else."""
    return batch


def kv_append(c: Context, kv_d: Array, k: Array, v: Array, plan: StepArrays) -> Array:
    """Writes K and V [T, K, D] to the slots of the batch."""
    xp, block_size = c.xp, kv_d.shape[1]
    rows = c.as_type(xp.concat([k, v], axis=1), kv_d)
    return xp.put(kv_d, plan.slots // block_size, plan.slots % block_size, rows)


def kv_copy(
    c: Context, kv_d: Array, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
) -> Array:
    """Copies block src[i] to block dst[i]."""
    xp = c.xp
    block_size = kv_d.shape[1]
    blocks = xp.take(kv_d, xp.asarray(src), axis=0)
    rows = np.repeat(dst, block_size).astype(np.int32)
    cols = np.tile(np.arange(block_size, dtype=np.int32), len(dst))
    return xp.put(
        kv_d, xp.asarray(rows), xp.asarray(cols), xp.reshape(blocks, (-1, *kv_d.shape[2:]))
    )
