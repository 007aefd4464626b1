"""The backend that CUDA and ROCm share: torch arrays, Triton kernels, recorded graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from leadframe.errors import ConfigError, Unsupported
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
from leadframe.platform.info import Limits
from leadframe_torch import (
    AcceleratorLayer,
    CompileMode,
    DeviceLayer,
    HostLayer,
    ModuleGraphs,
    Rank,
)
from leadframe_torch.backend import TorchBackend
from leadframe_torch.dtypes import from_host, to_host, torch_dtype
from leadframe_torch.steps import FunctionStep, padding_batch
from leadframe_torch.weights import read_part
from leadframe_triton.arch import INTERPRETER, Arch, arch_named
from leadframe_triton.capabilities import GraphKind, capabilities
from leadframe_triton.launch import LaunchContext, ceil_div, current_device
from leadframe_triton.ops import triton_ops
from leadframe_triton.tuning import TileTuner
from leadframe_triton.upload import PinnedUploader

_LEAST_SPLIT_TOKENS: Final = 512
_MOST_FIXED_SPLITS: Final = 16
_DEFAULT_MODEL_LEN: Final = 32768
_MOST_INTERPRETED_RANKS: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose with `-o`.

    Attributes:
      graphs: record steps as graphs.
      compile: "step" runs each bucket's step through torch.compile.
      batch_invariant: a sequence's bits do not depend on the others in its batch.
      tune: measure the tiles that nobody has measured on this machine.
    """

    graphs: bool = True
    compile: CompileMode = "eager"
    batch_invariant: bool = False
    tune: bool = False


class TritonBackend(TorchBackend):
    """Serves models on a GPU, or in Triton's interpreter.

    Args:
      layer: the device.
      arch: its architecture; decides tiles, dtypes and what is claimed.
      settings: what the user chose.
      limits: what the engine will ask.

    Raises:
      ConfigError: the settings exclude each other.
    """

    def __init__(self, layer: DeviceLayer, arch: Arch, settings: Settings, limits: Limits) -> None:
        rank = Rank.of(limits)
        if settings.batch_invariant and rank.count > 1:
            raise ConfigError(
                f"--tensor-parallel-size is {rank.count} with -o batch_invariant=on: how ranks add "
                "up depends on the batch; leave out one of the two"
            )
        self.arch, self._settings = arch, settings
        self.launches = LaunchContext(
            arch,
            _num_cores(layer.device),
            TileTuner(layer.device, measure=settings.tune),
            fixed_split_tokens(limits) if settings.batch_invariant else 0,
            current_device(layer.device),
        )
        self._uploader = None if arch.vendor == "none" else PinnedUploader(layer.device)
        caps = capabilities(
            arch,
            batch_invariant=settings.batch_invariant,
            graph=_graph_kind(layer, arch, settings),
        )
        if not settings.batch_invariant:
            most = _most_ranks(layer.device, rank)
            caps = replace(caps, tensor_parallel=most, rank_processes=True)
        super().__init__(layer, caps, compile_mode=settings.compile, rank=rank)

    def extra_ops(self) -> Mapping[str, Callable[..., Any]]:
        """The Triton kernels."""
        return triton_ops(self.launches, batch_invariant=self._settings.batch_invariant)

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array, or this rank's part of a weight, through pinned memory."""
        if self._uploader is None:
            return super().upload(source, dtype, partition, role)
        host = read_part(source, partition, self._rank)
        target = None if dtype is None else torch_dtype(dtype)
        with self.errors("load", host.nbytes):
            tensor = self._uploader.copy(host, target)
        self.held.add(tensor)
        return tensor

    # --- the KV cache, 8-bit types included, which torch neither indexes nor names --------

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of one block over all layers."""
        return super().kv_block_bytes(_as_bytes(spec))

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates zeroed blocks, in the element types that the kernels read."""
        if spec.dtype not in self.caps.kv_dtypes:
            known = ", ".join(self.caps.kv_dtypes)
            raise Unsupported("kv_alloc", spec.dtype, f"KV dtypes of {self.arch.name} are {known}")
        return super().kv_alloc(spec, num_blocks)

    def new_kv_layer(self, spec: KVSpec, layer: KVLayerSpec, num_blocks: int) -> KVLayer:
        """Allocates one zeroed layer."""
        raw = super().new_kv_layer(_as_bytes(spec), layer, num_blocks)
        return raw.view(getattr(torch, spec.dtype))

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Reads blocks as [N, 2, block_size, kv_heads, head_dim]; 8-bit types as float32."""
        if layer.element_size() > 1:
            return super().kv_read(layer, block_ids)
        rows = layer.view(torch.uint8).index_select(1, self._ids(block_ids)).view(layer.dtype)
        return self.download(rows.to(torch.float32).transpose(0, 1))

    def kv_write(
        self, layer_d: KVLayer, block_ids: Sequence[int], data: npt.NDArray[Any]
    ) -> KVLayer:
        """Writes blocks from [N, 2, block_size, kv_heads, head_dim], in place."""
        if layer_d.element_size() > 1:
            return super().kv_write(layer_d, block_ids, data)
        rows = from_host(np.ascontiguousarray(data)).to(self.device).to(layer_d.dtype)
        super().kv_write(layer_d.view(torch.uint8), block_ids, to_host(rows.view(torch.uint8)))
        return layer_d

    # --- steps ----------------------------------------------------------------------------

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Wraps, compiles or records a step; with `compile=step`, records what was compiled."""
        if not capture or self._settings.compile == "eager":
            return super().compile(step, bucket, weights, kv, capture)
        with self.errors("compile", 0):
            # Tiles are chosen, and perhaps measured, before tracing: it may read no file.
            FunctionStep(step, bucket, weights, self.device).run(padding_batch(bucket), kv)
            traced = self.trace(step, bucket, weights, kv)
            if self.layer.graphs is None:
                return traced
            recorded = self.record(traced.function, bucket, weights, kv)
        recorded.compile_seconds, recorded.cache_hit = traced.compile_seconds, traced.cache_hit
        traced.close()
        return recorded

    def close(self) -> None:
        """Waits for the device and frees what was held."""
        if self._uploader is not None:
            self._uploader.close()
        super().close()


def _graph_kind(layer: DeviceLayer, arch: Arch, settings: Settings) -> GraphKind:
    if layer.graphs is not None:
        return "record"
    # What is interpreted cannot be traced.
    return "none" if settings.compile == "eager" or arch is INTERPRETER else "compile"


def _as_bytes(spec: KVSpec) -> KVSpec:
    """The same cache in a type of the same size that torch backends name."""
    return replace(spec, dtype="uint8") if spec.dtype.startswith("float8") else spec


def fixed_split_tokens(limits: Limits) -> int:
    """Keys a split in batch-invariant mode: a function of the model's length alone."""
    longest = limits.max_model_len or _DEFAULT_MODEL_LEN
    return max(_LEAST_SPLIT_TOKENS, ceil_div(longest, _MOST_FIXED_SPLITS))


def device_backend(index: int, settings: Settings, limits: Limits) -> TritonBackend:
    """Builds the backend of a GPU, or of the one that a rank counts from there.

    torch names HIP devices "cuda" as well.

    The architecture is torch's word, not the driver's: the two may number devices differently.
    """
    device = torch.device("cuda", index + limits.rank)
    graphs = ModuleGraphs(device, "CUDAGraph") if settings.graphs else None
    return TritonBackend(AcceleratorLayer(device, graphs), _arch(device), settings, limits)


def interpreter_backend(settings: Settings, limits: Limits) -> TritonBackend:
    """Builds a backend that interprets the kernels on the host."""
    layer = HostLayer(shared_by=limits.tensor_parallel_size)
    return TritonBackend(layer, INTERPRETER, settings, limits)


def _arch(device: torch.device) -> Arch:
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    if torch.version.hip is not None:
        return arch_named(properties.gcnArchName)
    return arch_named(f"sm_{properties.major}{properties.minor}")


def _most_ranks(device: torch.device, rank: Rank) -> int:
    """How many ranks there may be: the GPUs from the first rank's on."""
    if device.type == "cpu":
        return _MOST_INTERPRETED_RANKS
    first = (device.index or 0) - rank.index
    return int(torch.get_device_module(device).device_count()) - first


def _num_cores(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)
