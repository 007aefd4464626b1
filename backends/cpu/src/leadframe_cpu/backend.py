"""The CPU backend: torch on the host, with native kernels where a compiler is at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import numpy.typing as npt
import torch

from leadframe.errors import ConfigError
from leadframe.platform.backend import (
    KV,
    Array,
    CompiledStep,
    KVLayer,
    KVLayerSpec,
    KVSpec,
    Partition,
    StepFunction,
    WeightRole,
    WeightSource,
)
from leadframe.platform.batch import Bucket
from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe.platform.info import MemoryInfo
from leadframe_cpu.cpu_info import cpu_info
from leadframe_cpu.library import Library, NativeUnavailable, load_library
from leadframe_cpu.native_kv import GROUP, NativeKV
from leadframe_cpu.native_ops import NativeOps
from leadframe_cpu.packed import PackedWeight, Packer
from leadframe_cpu.replay import Recorder, ReplayedStep, has_native_cache, is_worth_recording
from leadframe_cpu.weight_store import WeightStore
from leadframe_torch import ATTENTION_FEATURES, CompileMode, HostLayer, Rank, TorchBackend
from leadframe_torch.dtypes import torch_dtype
from leadframe_torch.weights import part_index

logger = logging.getLogger(__name__)

NativeMode = Literal["auto", "on", "off"]

_DTYPES: Final = ("float32", "bfloat16")
_BLOCK_SIZES: Final = (16, 32, 64, 128, 8, 4, 1)
_MOST_RANKS: Final = 16
_SPIN_US: Final = 50
"""How long idle threads look for work before they sleep: longer than the gap between two ops,
short enough that another process hardly notices."""


def _why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - ATTENTION_FEATURES)
    if unknown:
        known = " and ".join(sorted(ATTENTION_FEATURES))
        return f"attention feature {unknown[0]!r} is not implemented; there are {known}"
    for dtype in (spec.dtype, spec.kv_dtype):
        if dtype is not None and dtype not in _DTYPES:
            return f"dtype {dtype} is not implemented; there are {' and '.join(_DTYPES)}"
    if spec.block_size is not None and spec.block_size not in _BLOCK_SIZES:
        return f"block size {spec.block_size} is not one of {_BLOCK_SIZES}"
    return None


def _capabilities(is_native: bool) -> Capabilities:
    # The kernels compute in float32 and keep small weights small, so bfloat16 gains nothing there.
    # Through torch it is the faster one, if the processor multiplies it.
    dtypes = _DTYPES if is_native or not cpu_info().has_bf16 else _DTYPES[::-1]
    return Capabilities(
        family="torch",
        compute_dtypes=dtypes,
        kv_dtypes=dtypes,
        block_sizes=_BLOCK_SIZES,
        attention_features=ATTENTION_FEATURES,
        deterministic=True,
        batch_invariant=is_native,
        tensor_parallel=_MOST_RANKS,
        rank_processes=True,
        plain_weights=not is_native,
        why_not=_why_not,
    )


class CpuBackend(TorchBackend):
    """Serves models on the host.

    Args:
      threads: cores that ops may use at once.
      compile_mode: as in `TorchBackend`; "step" traces torch's ops, so it excludes the kernels.
      native: "on" requires the native kernels, "off" does without, "auto" uses them if they can
        be built.
      rank: the place in a tensor-parallel group, all of whose ranks are on this host.

    Attributes:
      native_reason: why the native kernels are not used; empty when they are.
    """

    def __init__(
        self,
        threads: int,
        compile_mode: CompileMode = "eager",
        native: NativeMode = "auto",
        rank: Rank | None = None,
    ) -> None:
        rank = rank or Rank()
        library, self.native_reason = _load(native, compile_mode)
        self._native: NativeOps | None = None
        if library is None:
            torch.set_num_threads(threads)
        else:
            library.set_threads(threads, _SPIN_US)
            self._packer = Packer(library)
            self._native = NativeOps(library, self._packer)
            self._store = WeightStore(self._packer)
            self._recorder = Recorder(library, self._native)
        caps = _capabilities(library is not None)
        layer = HostLayer(shared_by=rank.count)
        super().__init__(layer, caps, compile_mode=compile_mode, rank=rank)

    def extra_ops(self) -> Mapping[str, Callable[..., Any]]:
        """The native kernels."""
        return {} if self._native is None else self._native.table()

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array or a weight; matrices for `linear` and `embed` become panels."""
        if self._native is None or role == "tensor" or len(source.shape) != 2:
            return super().upload(source, dtype, partition, role)
        index = part_index(tuple(source.shape), partition, self._rank)
        with self.errors("load", 0):
            weight, is_new = self._store.pack(source, dtype or str(source.dtype), index)
        if is_new:
            self.held.add(weight.data)
        return weight

    def download(self, array: Array) -> npt.NDArray[Any]:
        """Copies a tensor or a packed weight to the host; bfloat16 arrives as float32."""
        if isinstance(array, PackedWeight):
            array = self._packer.unpack(array)
        return super().download(array)

    def memory(self) -> MemoryInfo:
        """Reads the host's memory; recorded steps' memory counts as used."""
        info = super().memory()
        if self._native is None:
            return info
        arena = self._recorder.arena.num_bytes
        return replace(info, used=info.used + arena, peak=info.peak + arena)

    def close(self) -> None:
        """Forgets recordings and sources; weights and caches die with their owners."""
        if self._native is not None:
            self._recorder.clear()
            self._store.forget()
        super().close()

    # --- steps ----------------------------------------------------------------------------

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Wraps a step; steps that only decode are recorded when they come again.

        Not with several ranks: a recording would not repeat what they exchange.
        """
        is_recorded = self._native is not None and self._rank.count == 1
        if is_recorded and is_worth_recording(bucket) and has_native_cache(kv):
            return ReplayedStep(self._recorder, step, weights)
        return super().compile(step, bucket, weights, kv, capture)

    # --- the KV cache ---------------------------------------------------------------------

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of one block over all layers; the native layout pads head_dim to 16."""
        if not self._is_native(spec):
            return super().kv_block_bytes(spec)
        item = torch_dtype(spec.dtype).itemsize
        return item * sum(
            self.kv_heads(layer) * NativeKV.row_elements(spec.block_size, layer.head_dim)
            for layer in spec.layers
        )

    def _is_native(self, spec: KVSpec) -> bool:
        return self._native is not None and spec.block_size % GROUP == 0

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates zeroed blocks. The weights are loaded by now: their sources may close."""
        if self._native is not None:
            self._store.forget()
        return super().kv_alloc(spec, num_blocks)

    def new_kv_layer(self, spec: KVSpec, layer: KVLayerSpec, num_blocks: int) -> KVLayer:
        """Allocates one zeroed layer, in the layout of the kernel that will read it."""
        if not self._is_native(spec):
            return super().new_kv_layer(spec, layer, num_blocks)
        sizes = num_blocks, spec.block_size, self.kv_heads(layer), layer.head_dim
        return NativeKV.allocate(*sizes, torch_dtype(spec.dtype))

    def kv_free(self, kv_d: KV) -> None:
        """Frees a KV cache, and the recorded steps that use it."""
        if self._native is not None:
            self._recorder.clear()
        super().kv_free(kv_d)

    def kv_storage(self, layer: KVLayer) -> torch.Tensor:
        """The tensor that owns a layer's memory."""
        return layer.data if isinstance(layer, NativeKV) else super().kv_storage(layer)

    def kv_views(self, layer: KVLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as views [num_blocks, block_size, kv_heads, head_dim]."""
        if isinstance(layer, NativeKV):
            return layer.keys, layer.values
        return super().kv_views(layer)


def _load(native: NativeMode, compile_mode: CompileMode) -> tuple[Library | None, str]:
    """Returns the native kernels, or None and why not.

    Raises:
      ConfigError: they were required.
    """
    if native == "off":
        return None, "switched off by -o native=off"
    reason = ""
    if compile_mode != "eager":
        reason = f"torch.compile (-o compile={compile_mode}) traces torch's own ops"
    else:
        try:
            return load_library(), ""
        except NativeUnavailable as error:
            reason = str(error)
    if native == "on":
        raise ConfigError(f"-o native=on: the native kernels cannot be used: {reason}")
    logger.warning("running without native kernels, several times slower: %s", reason)
    return None, reason
