"""IPEX's `PagedAttention`, in both of its calling conventions.

The CPU build reads the cache as [N, K, block_size, D] and takes 15 arguments for a decode; the
XPU build reads [N, block_size, K, D], puts one more positional argument into the decode call, and
returns nothing. Only what both share is passed by position, what differs is in `Convention`, and
every call is treated as one that writes its output argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from leadframe.platform.capabilities import AttnParams
from leadframe_torch import attention as torch_attention
from leadframe_xpu.guard import check_append, check_cache, check_query
from leadframe_xpu.native import KernelFacts, blank_output, packed_heads
from leadframe_xpu.paged_plan import PagedPlan, finish

OFF: Final = -1
"""IPEX's word for "no window" and "no cap"."""

DecodeCall = Literal["varlen", "single_query"]


class PagedAttentionApi(Protocol):
    """The class methods of `ipex.llm.modules.PagedAttention` that are called here."""

    reshape_and_cache: Callable[..., Any]
    reshape_and_cache_flash: Callable[..., Any]
    single_query_cached_kv_attention: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Convention:
    """How one build of IPEX is called.

    Attributes:
      facts: what its kernels can do.
      has_decode_call: `single_query_cached_kv_attention` reads the same cache as the varlen
        call, and does not wait for the device to learn how heads map.
      least_window: the varlen call takes "no key before a token" for "no window" when this is 2.
      leaks_outside_window: its masks multiply a NaN outside the window by zero.
    """

    facts: KernelFacts
    has_decode_call: bool
    least_window: int
    leaks_outside_window: bool


HOST: Final = Convention(
    KernelFacts(
        name="ipex",
        dtypes=("float32", "bfloat16", "float16"),
        # the decode call cuts keys into parts of 128: other sizes corrupt memory
        block_sizes=(16, 32, 64, 128, 8, 4, 2, 1),
        is_hnd=True,
        slot_dtype=torch.int32,
    ),
    has_decode_call=True,
    least_window=2,
    leaks_outside_window=True,
)
"""IPEX 2.8's CPU build."""

XPU: Final = Convention(
    KernelFacts(
        name="ipex",
        dtypes=("bfloat16", "float16"),
        block_sizes=(64, 16, 32, 128),
        # for any other, IPEX copies every used block and waits for the device
        head_dim_multiple=64,
    ),
    has_decode_call=False,
    least_window=1,
    leaks_outside_window=False,
)
"""IPEX 2.8's XPU build, from its source; not run here."""


class IpexKernels:
    """Ops over IPEX's paged attention.

    Args:
      api: `ipex.llm.modules.PagedAttention`, or something that behaves like it.
      convention: which build it is.
      decode: the call that serves decode rows.
    """

    def __init__(
        self, api: PagedAttentionApi, convention: Convention, decode: DecodeCall = "varlen"
    ) -> None:
        self._api, self._convention = api, convention
        self._decodes_apart = decode == "single_query" and convention.has_decode_call
        self._write = (
            api.reshape_and_cache if convention.facts.is_hnd else api.reshape_and_cache_flash
        )
        self._head_maps: dict[tuple[int, int], Tensor] = {}

    @property
    def facts(self) -> KernelFacts:
        """What they can do."""
        return self._convention.facts

    def kv_append(self, kv_d: Tensor, k: Tensor, v: Tensor, plan: PagedPlan) -> Tensor:
        """Writes K and V [T, K, D] to the slots of the batch, in place."""
        facts = plan.facts
        check_cache(kv_d, is_hnd=self.facts.is_hnd)
        check_append(kv_d, k, v, plan.slots.shape[0], None if facts is None else facts.max_slot)
        keys, values = self._caches(kv_d)
        self._write(packed_heads(k), packed_heads(v), keys, values, plan.slots)
        return kv_d

    def attention(self, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams) -> Tensor:
        """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
        bucket = plan.arrays.bucket
        check_cache(kv, is_hnd=self.facts.is_hnd)
        check_query(q, kv, bucket.num_tokens, bucket.num_blocks, plan.facts)
        if params.window is not None and params.window < self._convention.least_window:
            return torch_attention.attention(q, kv, plan.torch, params)
        q, out = packed_heads(q), blank_output(q, plan)
        # the decode call cannot do both a window and a cap
        is_both = params.window is not None and params.softcap is not None
        first = bucket.num_decodes if self._decodes_apart and not is_both else 0
        if first:
            self._single_query(out, q, kv, plan, params, first)
        if first < bucket.num_seqs:
            self._varlen(out, q, kv, plan, params, first)
        if self._leaked(out, params):
            return torch_attention.attention(q, kv, plan.torch, params)
        return finish(out, plan)

    def _varlen(
        self, out: Tensor, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams, first: int
    ) -> None:
        """Rows [first, S)."""
        keys, values = self._caches(kv)
        batch, window = plan.arrays, params.window
        self._api.flash_attn_varlen_func(
            out,
            q,
            keys,
            values,
            batch.query_start[first:],
            plan.kv_starts[first:],
            plan.max_query,  # tokens past it would not be computed
            batch.bucket.num_blocks * kv.shape[2],  # below a block, tables are read past their end
            params.scale,
            True,
            batch.block_table[first:],
            None,
            # the varlen call counts the keys before a token, the decode call the token too
            window_size_left=OFF if window is None else window - 1,
            window_size_right=OFF if window is None else 0,
            softcap=float(OFF if params.softcap is None else params.softcap),
        )

    def _single_query(
        self, out: Tensor, q: Tensor, kv: Tensor, plan: PagedPlan, params: AttnParams, rows: int
    ) -> None:
        """Rows [0, rows), one token each."""
        keys, values = self._caches(kv)
        batch = plan.arrays
        self._api.single_query_cached_kv_attention(
            out[:rows],
            q[:rows],
            keys,
            values,
            self._head_map(q.shape[1], kv.shape[3], q.device),
            params.scale,
            batch.block_table[:rows],
            plan.kv_lens[:rows],
            kv.shape[2],
            batch.bucket.num_blocks * kv.shape[2],
            None,
            window_size=OFF if params.window is None else params.window,
            softcap=float(OFF if params.softcap is None else params.softcap),
        )

    def _caches(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        sides = kv.transpose(2, 3) if self.facts.is_hnd else kv
        return sides[0], sides[1]

    def _head_map(self, num_heads: int, num_kv_heads: int, device: torch.device) -> Tensor:
        """int32 [H]: the KV head of each query head."""
        key = (num_heads, num_kv_heads)
        if key not in self._head_maps:
            heads = torch.arange(num_kv_heads, dtype=torch.int32, device=device)
            self._head_maps[key] = heads.repeat_interleave(num_heads // num_kv_heads)
        return self._head_maps[key]

    def _leaked(self, out: Tensor, params: AttnParams) -> bool:
        """Whether keys outside a window may have made this NaN; torch's attention then decides."""
        may = self._convention.leaks_outside_window and params.window is not None
        return may and not bool(torch.isfinite(out).all())
