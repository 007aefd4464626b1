"""What a set of native kernels must offer to become the ops of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from leadframe.platform.capabilities import AttnParams, OpSpec
from leadframe_xpu.paged_plan import PagedPlan
from leadframe_xpu.ranking import KernelName


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What kernels can do, and how they are called.

    Attributes:
      name: as in `ranking.ORDER`.
      dtypes: of queries and cache alike, best first.
      block_sizes: tokens a block, best first.
      head_dim_multiple: head dimensions that they take without copying the cache.
      features: from `AttnParams.features`.
      is_hnd: they read the cache as [N, K, block_size, D], not [N, block_size, K, D].
      slot_dtype: index type of slots.
    """

    name: KernelName
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    head_dim_multiple: int = 1
    features: frozenset[str] = frozenset({"window", "softcap"})
    is_hnd: bool = False
    slot_dtype: torch.dtype = torch.int64

    def why_not(self, spec: OpSpec) -> str | None:
        """A reason why these kernels cannot serve a spec, or None."""
        if spec.op not in ("attention", "kv_append", "kv_copy"):
            return None
        if spec.op == "attention":
            return self._why_not_attention(spec)
        return self._why_not_cache(spec)

    def _why_not_attention(self, spec: OpSpec) -> str | None:
        if spec.dtype not in self.dtypes:
            return f"{self.name} computes in {' and '.join(self.dtypes)}, not {spec.dtype}"
        unknown = sorted(spec.features - self.features)
        if unknown:
            return f"{self.name} does not implement {', '.join(unknown)}"
        if spec.head_dim is not None and spec.head_dim % self.head_dim_multiple:
            multiple = self.head_dim_multiple
            return f"{self.name} takes head dimensions that are multiples of {multiple}"
        return self._why_not_cache(spec)

    def _why_not_cache(self, spec: OpSpec) -> str | None:
        if spec.kv_dtype is not None and spec.kv_dtype != spec.dtype:
            return f"{self.name} reads a cache of the queries' type {spec.dtype}"
        if spec.block_size is not None and spec.block_size not in self.block_sizes:
            sizes = ", ".join(map(str, self.block_sizes))
            return f"{self.name} takes blocks of {sizes} tokens, not {spec.block_size}"
        return None


class NativeKernels(Protocol):
    """Attention kernels of one library."""

    @property
    def facts(self) -> KernelFacts:
        """What they can do."""

    def kv_append(self, kv_d: Tensor, k: Tensor, v: Tensor, plan: PagedPlan) -> Tensor:
        """Writes K and V [T, K, D] to the slots of the batch, in place."""

    def attention(self, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams) -> Tensor:
        """Causal paged attention of q [T, H, D]; returns [T, H, D]."""


def native_ops(kernels: NativeKernels) -> Mapping[str, Callable[..., Any]]:
    """The ops that replace those of leadframe_torch."""
    return {"kv_append": kernels.kv_append, "attention": kernels.attention}


def blank_output(q: Tensor, plan: PagedPlan) -> Tensor:
    """An output for kernels that write only tokens which belong to a row; zeros elsewhere."""
    if plan.owns_every_token:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return torch.zeros_like(q, memory_format=torch.contiguous_format)


def packed_heads(x: Tensor) -> Tensor:
    """Returns x [T, heads, D] with the heads of a token next to each other; tokens may be apart."""
    is_packed = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if is_packed else x.contiguous()
