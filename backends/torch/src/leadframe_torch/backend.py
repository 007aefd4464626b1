"""`TorchBackend`: the thirteen members of the contract for any torch device.

A device of one's own is a subclass, or even just an instance::

    TorchBackend(AcceleratorLayer(torch.device("mychip:0")), caps)

Override `extra_ops` to replace ops by kernels of one's own, and `caps` to say what they can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadframe.errors import ConfigError, ContractViolation, DeviceOOM, Unsupported
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
from leadframe.platform.batch import Bucket, StepArrays
from leadframe.platform.capabilities import AttnParams, Capabilities
from leadframe.platform.info import MemoryInfo
from leadframe_torch import attention, layer_ops, sampling_ops
from leadframe_torch.attention_plan import AttentionPlan, plan
from leadframe_torch.collectives import Collectives
from leadframe_torch.devices import DeviceLayer, Holdings, device_errors
from leadframe_torch.dtypes import from_host, to_host, torch_dtype, zeros
from leadframe_torch.namespace import torch_namespace
from leadframe_torch.recordings import Recordings
from leadframe_torch.steps import FunctionStep, RecordedStep, Tracer
from leadframe_torch.weights import Rank, read_part

CompileMode = Literal["eager", "step"]

ATTENTION_FEATURES: Final = frozenset({"window", "softcap"})
"""What the plain torch attention implements."""


class TorchBackend:
    """Serves models on one torch device.

    Attributes:
      device: where tensors are created.
      held: counts what was handed out.
      layer: the device's memory and graphs.

    Args:
      layer: the device, its memory and its graphs.
      caps: what this backend can do.
      compile_mode: "eager" runs steps as Python, or as recorded graphs where the device has
        them; "step" compiles each bucket's whole step with torch.compile.
      rank: the place in a tensor-parallel group; `caps` must then say `rank_processes`.

    Raises:
      ConfigError: steps shared by ranks cannot be traced.
    """

    def __init__(
        self,
        layer: DeviceLayer,
        caps: Capabilities,
        *,
        compile_mode: CompileMode = "eager",
        rank: Rank | None = None,
    ) -> None:
        if compile_mode == "step":  # see `_share_ops`
            caps = replace(caps, tensor_parallel=1, rank_processes=False)
        self.layer, self._caps = layer, caps
        self.device = layer.device
        self._compile_mode, self._rank = compile_mode, rank or Rank()
        self.held = Holdings()
        self._xp = torch_namespace(self.device)
        self._ops: dict[str, Callable[..., Any]] = self._base_ops() | dict(self.extra_ops())
        self._tracer = Tracer()
        self._recordings: Recordings | None = None
        if layer.graphs is not None:
            self._recordings = Recordings(self.device, layer.graphs)
        self._collectives: Collectives | None = None
        if self._rank.count > 1:
            self._collectives = self._share_ops()

    def _share_ops(self) -> Collectives:
        """Makes the ops that ranks do together; with one rank there is nothing to do."""
        if self._compile_mode == "step":
            raise ConfigError(
                f"--tensor-parallel-size is {self._rank.count} with -o compile=step: torch.compile "
                "does not trace what ranks exchange; leave out one of the two"
            )
        shared = Collectives(self._rank, self.device)
        self._ops["embed"] = shared.shared_embed(self._ops["embed"])
        self._ops |= {"all_reduce": shared.all_reduce, "all_gather": shared.all_gather}
        return shared

    def extra_ops(self) -> Mapping[str, Callable[..., Any]]:
        """Ops that replace or join the torch ones; the place for a device's own kernels."""
        return {}

    def may_read_lengths(self) -> bool:
        """Whether `plan` may copy lengths to the host: never in a graph or a traced step."""
        return self.layer.graphs is None and self._compile_mode == "eager"

    def _base_ops(self) -> dict[str, Callable[..., Any]]:
        return {**layer_ops.OPS, **sampling_ops.OPS, **attention.OPS, "plan": self.attention_plan}

    def attention_plan(self, batch: StepArrays, params: AttnParams) -> AttentionPlan:
        """The op `plan`; kernels of one's own may build theirs on it."""
        return plan(batch, params, may_read=self.may_read_lengths())

    # --- facts ----------------------------------------------------------------------------

    @property
    def caps(self) -> Capabilities:
        """Static facts."""
        return self._caps

    @property
    def xp(self) -> Any:
        """The array API over torch on this device."""
        return self._xp

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Every op of the contract, none left to the reference."""
        return self._ops

    # --- memory ---------------------------------------------------------------------------

    def errors(self, phase: str, requested: int) -> AbstractContextManager[None]:
        """Turns torch's errors inside a `with` block into the contract's."""
        return device_errors(self.layer, self.held, phase, requested)

    def step_errors(self) -> AbstractContextManager[None]:
        """The same for a running step, so that the engine can make room and try again."""
        return self.errors("step", 0)

    def memory(self) -> MemoryInfo:
        """Reads the device's memory."""
        return self.layer.memory(self.held)

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array, or this rank's part of a weight, to the device."""
        host = read_part(source, partition, self._rank)
        target = None if dtype is None else torch_dtype(dtype)
        with self.errors("load", host.nbytes):
            tensor = from_host(host).to(self.device, target)
        self.held.add(tensor)
        return tensor

    def download(self, array: Array) -> npt.NDArray[Any]:
        """Copies a tensor to the host; bfloat16 arrives as float32."""
        with self.errors("step", 0):
            return to_host(array)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of one block over all layers."""
        item = torch_dtype(spec.dtype).itemsize
        return sum(
            2 * spec.block_size * self.kv_heads(layer) * layer.head_dim * item
            for layer in spec.layers
        )

    def kv_heads(self, layer: KVLayerSpec) -> int:
        """KV heads of a layer that this rank holds; ranks share one where there are fewer.

        Raises:
          Unsupported: they do not divide among the ranks.
        """
        heads, count = layer.num_kv_heads, self._rank.count
        if heads % count and count % heads:
            reason = f"{heads} KV heads do not divide among {count} ranks"
            raise Unsupported("kv_alloc", layer, reason)
        return max(1, heads // count)

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates zeroed blocks."""
        if spec.dtype not in self.caps.kv_dtypes:
            offered = ", ".join(self.caps.kv_dtypes)
            raise Unsupported("kv_alloc", spec, f"KV dtype {spec.dtype} is none of {offered}")
        needed, free = self.kv_block_bytes(spec) * num_blocks, self.memory().free
        if needed > free:
            raise DeviceOOM(needed, free, "kv")
        with self.errors("kv", needed):
            kv = [self.new_kv_layer(spec, layer, num_blocks) for layer in spec.layers]
        for handle in kv:
            self.held.add(self.kv_storage(handle))
        return kv

    def kv_free(self, kv_d: KV) -> None:
        """Frees a KV cache, even while someone still holds its handles."""
        self.layer.synchronize()
        for handle in kv_d:
            tensor = self.kv_storage(handle)
            self.held.release(tensor)
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
        kv_d.clear()
        self.layer.release_cached()

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Reads blocks as [N, 2, block_size, kv_heads, head_dim]."""
        ids = self._ids(block_ids)
        return to_host(torch.stack([view.index_select(0, ids) for view in self.kv_views(layer)], 1))

    def kv_write(
        self, layer_d: KVLayer, block_ids: Sequence[int], data: npt.NDArray[Any]
    ) -> KVLayer:
        """Writes blocks from [N, 2, block_size, kv_heads, head_dim], in place."""
        views, ids = self.kv_views(layer_d), self._ids(block_ids)
        expected = (len(block_ids), 2, *views[0].shape[1:])
        if data.shape != expected:
            raise ContractViolation("kv_write", [f"data is {data.shape}; it must be {expected}"])
        rows = from_host(np.ascontiguousarray(data)).to(self.device, views[0].dtype)
        for side, view in enumerate(views):
            view.index_copy_(0, ids, rows[:, side])
        return layer_d

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(list(block_ids), dtype=torch.int64, device=self.device)

    # The layout of a KV layer; a device with kernels of its own overrides these three (and
    # `kv_block_bytes`, where its layout pads).

    def new_kv_layer(self, spec: KVSpec, layer: KVLayerSpec, num_blocks: int) -> KVLayer:
        """Allocates one zeroed layer: [2, num_blocks, block_size, kv_heads, head_dim], K first."""
        shape = (2, num_blocks, spec.block_size, self.kv_heads(layer), layer.head_dim)
        return zeros(shape, torch_dtype(spec.dtype), self.device)

    def kv_storage(self, layer: KVLayer) -> Tensor:
        """The tensor that owns a layer's memory."""
        tensor: Tensor = layer
        return tensor

    def kv_views(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """K and V of a layer as views [num_blocks, block_size, kv_heads, head_dim]."""
        return layer[0], layer[1]

    # --- steps ----------------------------------------------------------------------------

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Wraps, compiles or records a step for a bucket."""
        with self.errors("compile", 0):
            if capture and self._compile_mode == "step":
                return self.trace(step, bucket, weights, kv)
            if capture and self._recordings is not None:
                return self.record(step, bucket, weights, kv)
            return FunctionStep(step, bucket, weights, self.device, self.step_errors)

    def trace(
        self, step: StepFunction, bucket: Bucket, weights: Mapping[str, Array], kv: KV
    ) -> FunctionStep:
        """Compiles a step's layers with torch.compile."""
        return self._tracer.trace(step, bucket, weights, kv, self.device, self.step_errors)

    def record(
        self, step: StepFunction, bucket: Bucket, weights: Mapping[str, Array], kv: KV
    ) -> RecordedStep:
        """Records a step's layers, on a device that has graphs."""
        assert self._recordings is not None
        recordings, device = self._recordings, self.device
        return RecordedStep(step, bucket, weights, kv, recordings, device, self.step_errors)

    def close(self) -> None:
        """Leaves the group of ranks, waits for the device and gives its cached memory back."""
        if self._collectives is not None:
            self._collectives.close()
        self.layer.synchronize()
        self.layer.release_cached()
