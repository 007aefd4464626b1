"""`XpuBackend`: leadframe_torch with native attention kernels and the cache laid out for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from leadframe.errors import Unsupported
from leadframe.platform.backend import KVLayer, KVLayerSpec, KVSpec
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams, Capabilities, OpSpec
from leadframe_torch import ATTENTION_FEATURES, DeviceLayer, TorchBackend
from leadframe_torch.dtypes import torch_dtype
from leadframe_xpu.native import NativeKernels, native_ops
from leadframe_xpu.paged_plan import PagedPlan, plan_batch
from leadframe_xpu.ranking import Ranking

_TORCH_DTYPES: Final = ("bfloat16", "float16", "float32")
_BLOCK_SIZES: Final = (64, 16, 32, 128)


class XpuBackend(TorchBackend):
    """Serves models on an Intel GPU, or on the host with IPEX's kernels.

    A KV layer is a tensor of shape [2, num_blocks, block_size, kv_heads, head_dim] whatever the
    kernels; for those that read heads first, only its strides differ.

    Args:
      layer: the device.
      kernels: native attention; None leaves attention to torch.
      ranking: how the kernels were chosen.

    Attributes:
      ranking: how the kernels were chosen.
    """

    def __init__(self, layer: DeviceLayer, kernels: NativeKernels | None, ranking: Ranking) -> None:
        self._kernels, self.ranking = kernels, ranking
        super().__init__(layer, _capabilities(layer, kernels))

    def extra_ops(self) -> Mapping[str, Callable[..., Any]]:
        """The native ops, and the plan that they take."""
        if self._kernels is None:
            return {}
        return {**native_ops(self._kernels), "plan": self._paged_plan}

    def _paged_plan(self, batch: StepArrays, params: AttnParams) -> PagedPlan:
        assert self._kernels is not None, "only native ops take this plan"
        slot_dtype, is_host = self._kernels.facts.slot_dtype, self.device.type == "cpu"
        return plan_batch(batch, self.attention_plan(batch, params), slot_dtype, may_read=is_host)

    def new_kv_layer(self, spec: KVSpec, layer: KVLayerSpec, num_blocks: int) -> KVLayer:
        """Allocates one zeroed layer, laid out for the kernels.

        Raises:
          Unsupported: they do not read this type or block size.
        """
        self._check_kv(spec)
        if self._kernels is None or not self._kernels.facts.is_hnd:
            return super().new_kv_layer(spec, layer, num_blocks)
        shape = (2, num_blocks, self.kv_heads(layer), spec.block_size, layer.head_dim)
        heads_first = torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=self.device)
        return heads_first.transpose(2, 3)

    def _check_kv(self, spec: KVSpec) -> None:
        """Some block sizes and types corrupt memory in the kernels: they never get a cache."""
        caps = self.caps
        if spec.dtype not in caps.kv_dtypes:
            raise Unsupported("kv_alloc", spec, f"the KV cache is {' or '.join(caps.kv_dtypes)}")
        if spec.block_size not in caps.block_sizes:
            sizes = ", ".join(map(str, caps.block_sizes))
            raise Unsupported("kv_alloc", spec, f"blocks have {sizes} tokens")


def _capabilities(layer: DeviceLayer, kernels: NativeKernels | None) -> Capabilities:
    is_host = layer.device.type == "cpu"
    dtypes: tuple[str, ...] = _TORCH_DTYPES
    block_sizes: tuple[int, ...] = _BLOCK_SIZES
    features, why_not = ATTENTION_FEATURES, _torch_why_not
    if kernels is not None:
        facts = kernels.facts
        dtypes, block_sizes = facts.dtypes, facts.block_sizes
        features, why_not = facts.features, facts.why_not
    return Capabilities(
        family="torch",
        compute_dtypes=dtypes,
        kv_dtypes=dtypes,
        block_sizes=block_sizes,
        attention_features=features,
        graph="record" if layer.graphs is not None else "none",
        asynchronous=not is_host,
        # the kernels are real, but not those of the silicon that this platform is named for
        simulated="simulated" if is_host else "",
        why_not=why_not,
    )


def _torch_why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - ATTENTION_FEATURES)
    return f"attention does not implement {', '.join(unknown)}" if unknown else None
