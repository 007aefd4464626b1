"""vllm-xpu-kernels: FlashAttention's varlen call over a paged cache [N, block_size, K, D]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from leadframe.errors import Unsupported
from leadframe.platform.capabilities import AttnParams
from leadframe_xpu.guard import check_append, check_cache, check_query
from leadframe_xpu.native import KernelFacts, blank_output, packed_heads
from leadframe_xpu.paged_plan import PagedPlan, finish

FACTS: Final = KernelFacts(
    name="vllm-xpu-kernels",
    dtypes=("bfloat16", "float16"),
    block_sizes=(64, 16, 32, 128),
    head_dim_multiple=32,
)

SPECULATIVE_TOKENS: Final = 16
"""Batches of equal rows up to this many tokens take a path of their own; the library's default."""


@dataclass(frozen=True, slots=True)
class VllmApi:
    """What is called.

    Attributes:
      flash_attn_varlen_func: of the package's `flash_attn_interface`.
      reshape_and_cache_flash: the registered operator.
      speculative_tokens: the threshold of the path for speculative decoding.
      missing: configurations that the wheel has no kernel for and that were computed by a
        reference instead.
    """

    flash_attn_varlen_func: Callable[..., Any]
    reshape_and_cache_flash: Callable[..., Any]
    speculative_tokens: int = SPECULATIVE_TOKENS
    missing: set[str] = field(default_factory=set)


class VllmKernels:
    """Ops over vllm-xpu-kernels."""

    facts = FACTS

    def __init__(self, api: VllmApi) -> None:
        self._api = api
        self._unit: Tensor | None = None

    def kv_append(self, kv_d: Tensor, k: Tensor, v: Tensor, plan: PagedPlan) -> Tensor:
        """Writes K and V [T, K, D] to the slots of the batch, in place."""
        facts = plan.facts
        check_cache(kv_d, is_hnd=False)
        check_append(kv_d, k, v, plan.slots.shape[0], None if facts is None else facts.max_slot)
        scale = self._unit_scale(kv_d.device)
        self._api.reshape_and_cache_flash(
            packed_heads(k), packed_heads(v), kv_d[0], kv_d[1], plan.slots, "auto", scale, scale
        )
        return kv_d

    def attention(self, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams) -> Tensor:
        """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
        batch, bucket = plan.arrays, plan.arrays.bucket
        check_cache(kv, is_hnd=False)
        check_query(q, kv, bucket.num_tokens, bucket.num_blocks, plan.facts)
        q, out = packed_heads(q), blank_output(q, plan)
        self._api.flash_attn_varlen_func(
            q=q,
            k=kv[0],
            v=kv[1],
            max_seqlen_q=self._max_query(plan),
            cu_seqlens_q=batch.query_start,
            max_seqlen_k=bucket.num_blocks * kv.shape[2],
            seqused_k=plan.kv_lens,
            softmax_scale=params.scale,
            causal=True,
            window_size=None if params.window is None else [params.window - 1, 0],
            softcap=params.softcap or 0.0,
            block_table=batch.block_table,
            out=out,
        )
        if self._api.missing:
            raise Unsupported("attention", params, self._advice())
        return finish(out, plan)

    def _max_query(self, plan: PagedPlan) -> int:
        """The bound on a row's tokens, raised above the threshold of the speculative path.

        That path takes rows * max_seqlen_q == tokens for "all rows are equally long", which
        padding and a bound of the bucket make true for ragged batches too.
        """
        if plan.max_query == 1:
            return 1
        return max(plan.max_query, self._api.speculative_tokens + 1)

    def _unit_scale(self, device: torch.device) -> Tensor:
        if self._unit is None:
            self._unit = torch.ones((), dtype=torch.float32, device=device)
        return self._unit

    def _advice(self) -> str:
        missing = "; ".join(sorted(self._api.missing))[:300]
        return (
            "vllm-xpu-kernels was built without this kernel and would compute it in slow Python "
            f"({missing}); run with -o kernels=torch, or build the library with it"
        )
