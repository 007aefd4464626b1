"""The thirteen members over a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from leadframe.platform import (
    KV,
    OP_NAMES,
    ArrayNamespace,
    Bucket,
    Capabilities,
    CompiledStep,
    DeviceOOM,
    KVSpec,
    MemoryInfo,
    OpSpec,
    Partition,
    StepFunction,
    Unsupported,
    WeightRole,
    WeightSource,
    reference_ops,
)
from leadframe_sim.device import SimArray, SimDevice
from leadframe_sim.namespace import sim_namespace
from leadframe_sim.steps import ExecutableStep, PlainStep, RecordedStep

Graph = Literal["none", "record", "compile"]
_FEATURES = frozenset({"window", "softcap"})
_BLOCK_SIZES = (16, 8, 32)
_Host = npt.NDArray[Any]


def _why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - _FEATURES)
    if unknown:
        return f"attention feature {unknown[0]!r} is not simulated"
    if spec.op not in OP_NAMES:
        return f"there is no op {spec.op!r}"
    if spec.block_size is not None and spec.block_size not in _BLOCK_SIZES:
        return f"block size {spec.block_size} is not one of {_BLOCK_SIZES}"
    if {spec.dtype, spec.kv_dtype} - {"float32", None}:
        return "the simulated device computes in float32 only"
    return None


CAPS = Capabilities(
    family="sim",
    block_sizes=_BLOCK_SIZES,
    attention_features=_FEATURES,
    deterministic=True,
    plain_weights=True,
    asynchronous=True,
    simulated="simulated",
    why_not=_why_not,
)


class SimBackend:
    """A backend over a simulated device.

    Args:
      device: the device.
      graph: what `compile` does: "record" like a GPU, "compile" like a TPU, "none".
    """

    def __init__(self, device: SimDevice, graph: Graph = "record") -> None:
        self.device = device
        device.functional = graph == "compile"
        self._caps = replace(CAPS, graph=graph, static_shapes=graph == "compile")
        self._xp = sim_namespace(device)
        all_ops = reference_ops(self._xp)
        names = ("kv_append", "attention", "kv_copy", "linear", "rms_norm")
        self._ops = {name: all_ops[name] for name in names}

    @property
    def caps(self) -> Capabilities:
        """Static facts."""
        return self._caps

    @property
    def xp(self) -> ArrayNamespace:
        """NumPy's functions as kernels."""
        return self._xp

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Five ops; the others run as references over `xp`."""
        return self._ops

    def memory(self) -> MemoryInfo:
        """The simulated memory."""
        d = self.device
        return MemoryInfo(d.total, d.total - d.used, d.used, d.peak)

    def upload(
        self,
        source: _Host | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> SimArray:
        """Copies to the device."""
        host = source if isinstance(source, np.ndarray) else source.read()
        target = host.dtype if dtype is None else np.dtype(dtype)
        size, free = host.size * target.itemsize, self.memory().free
        if size > free:
            raise DeviceOOM(size, free, "load")
        return self.device.allocate(np.array(host, target, order="C", copy=True), "load")

    def download(self, array: SimArray) -> _Host:
        """Waits for the queue and copies."""
        self.device.synchronize()
        return self.device.peek(array)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """K and V of every layer."""
        if spec.dtype != "float32":
            raise Unsupported("kv_alloc", spec, "the simulated device has only float32")
        return 2 * sum(s.num_kv_heads * s.head_dim for s in spec.layers) * spec.block_size * 4

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """One array a layer, zeroed."""
        size, free = self.kv_block_bytes(spec) * num_blocks, self.memory().free
        if size > free:
            raise DeviceOOM(size, free, "kv")
        shapes = [
            (num_blocks, spec.block_size, 2 * layer.num_kv_heads, layer.head_dim)
            for layer in spec.layers
        ]
        return [self.device.allocate(np.zeros(shape, np.float32), "kv") for shape in shapes]

    def kv_free(self, kv_d: KV) -> None:
        """Frees the layers; using one afterwards is an error."""
        for layer in kv_d:
            layer.release()

    def kv_read(self, layer: SimArray, block_ids: Sequence[int]) -> _Host:
        """Waits, and copies blocks to the canonical layout."""
        self.device.synchronize()
        blocks = self.device.peek(layer)[np.asarray(block_ids, np.int64)]
        split = blocks.reshape(*blocks.shape[:2], 2, -1, blocks.shape[3])
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3, 4))

    def kv_write(self, layer_d: SimArray, block_ids: Sequence[int], data: _Host) -> SimArray:
        """Waits, and copies blocks from the canonical layout."""
        self.device.synchronize()
        buffer = self.device.buffer(layer_d)
        rows = data.transpose(0, 2, 1, 3, 4).reshape(-1, *buffer.shape[1:])
        buffer[np.asarray(block_ids, np.int64)] = rows
        return layer_d

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Records, traces or wraps the step."""
        if self._caps.graph == "compile":
            return ExecutableStep(self.device, step, bucket, weights, kv)
        if self._caps.graph == "record" and capture:
            return RecordedStep(self.device, step, bucket, weights, kv)
        return PlainStep(self.device, step, bucket, weights)

    def close(self) -> None:
        """The device's memory goes with its handles."""


__all__ = ["CAPS", "SimBackend"]
