"""Leadframe's own Triton kernels, where a Triton with Intel's backend is installed.

They need nothing that only NVIDIA or AMD has; what an Intel chip needs is described here as one
more architecture. Compiled for Intel by nobody yet: see the documentation of this backend.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from leadframe.platform.capabilities import AttnParams
from leadframe_triton import attention as triton_attention
from leadframe_triton.arch import Arch
from leadframe_triton.launch import LaunchContext
from leadframe_xpu.guard import check_append, check_cache, check_query
from leadframe_xpu.native import KernelFacts
from leadframe_xpu.paged_plan import PagedPlan

FACTS: Final = KernelFacts(
    name="triton",
    dtypes=("bfloat16", "float16", "float32"),
    block_sizes=(64, 16, 32, 128),
    slot_dtype=torch.int32,
)

INTEL: Final = Arch(
    name="xpu", vendor="none", family="rdna", warp_size=32, shared_bytes=64 << 10, num_cores=160
)
"""Local memory and lanes of Intel's data-centre and client chips; the smallest tile tables."""


class TritonKernels:
    """Ops over leadframe_triton.

    Args:
      context: how kernels are launched.
    """

    facts = FACTS

    def __init__(self, context: LaunchContext) -> None:
        self._context = context

    def kv_append(self, kv_d: Tensor, k: Tensor, v: Tensor, plan: PagedPlan) -> Tensor:
        """Writes K and V [T, K, D] to the slots of the batch, in place."""
        facts = plan.facts
        check_cache(kv_d, is_hnd=False)
        check_append(kv_d, k, v, plan.slots.shape[0], None if facts is None else facts.max_slot)
        return triton_attention.kv_append(self._context, kv_d, k, v, plan.arrays)

    def attention(self, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams) -> Tensor:
        """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
        bucket = plan.arrays.bucket
        check_cache(kv, is_hnd=False)
        check_query(q, kv, bucket.num_tokens, bucket.num_blocks, plan.facts)
        return triton_attention.attention(self._context, q, kv, plan.arrays, params)


def intel_context(device: torch.device) -> LaunchContext:
    """Returns launch options for an Intel GPU."""
    properties = torch.xpu.get_device_properties(device)
    return LaunchContext(INTEL, num_cores=int(properties.gpu_subslice_count))
