"""The NumPy backend: the smallest honest implementation of the contract.

A KV layer is one array [num_blocks, block_size, 2 * kv_heads, head_dim], the layout of the
reference ops; `compile` returns the step as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.errors import DeviceOOM, Unsupported
from leadframe.platform.backend import KV, KVSpec, Partition, StepFunction, WeightRole, WeightSource
from leadframe.platform.batch import Bucket, StepBatch, unpack
from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import MemoryInfo
from leadframe.platform.namespace import ArrayNamespace
from leadframe.platform.ops import OP_NAMES
from leadframe.platform.reference.namespace import numpy_namespace
from leadframe.platform.reference_ops import reference_ops

_Array = npt.NDArray[Any]
_DTYPES = ("float32", "float64")
_BLOCK_SIZES = (16, 1, 4, 8, 32, 64, 128)
_FEATURES = frozenset({"window", "softcap"})


def _why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - _FEATURES)
    if unknown:
        return f"attention feature {unknown[0]!r} is not known; there are window and softcap"
    if spec.op not in OP_NAMES:
        return f"there is no op {spec.op!r}"
    if spec.block_size is not None and spec.block_size not in _BLOCK_SIZES:
        return f"block size {spec.block_size} is not one of {_BLOCK_SIZES}"
    for dtype in (spec.dtype, spec.kv_dtype):
        if dtype is not None and dtype not in _DTYPES:
            return f"dtype {dtype} is not implemented; NumPy computes in float32 and float64"
    return None


_CAPS = Capabilities(
    family="numpy",
    compute_dtypes=_DTYPES,
    kv_dtypes=_DTYPES,
    block_sizes=_BLOCK_SIZES,
    attention_features=_FEATURES,
    deterministic=True,
    plain_weights=True,
    why_not=_why_not,
)


@dataclass(slots=True)
class ReferenceStep:
    """A step that runs as it is."""

    step: StepFunction
    bucket: Bucket
    weights: Mapping[str, Any]
    bytes: int = 0
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Any], KV]:
        """Runs the step on the batch's own buffers."""
        with np.errstate(all="ignore"):  # a request may overflow; its logits are checked later
            return self.step(self.weights, kv_d, unpack(self.bucket, batch.ints, batch.floats))

    def close(self) -> None:
        """Holds nothing."""


class ReferenceBackend:
    """The thirteen members over NumPy.

    Args:
      memory_bytes: what the device pretends to have; None is what the host has.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._limit = memory_bytes
        self._ledger = _Ledger()
        self._xp = numpy_namespace()
        self._ops = reference_ops(self._xp)

    @property
    def caps(self) -> Capabilities:
        """Static facts."""
        return _CAPS

    @property
    def xp(self) -> ArrayNamespace:
        """NumPy with `put` and `top_k`."""
        return self._xp

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """The references: here they are the implementation."""
        return self._ops

    def memory(self) -> MemoryInfo:
        """Counts what was uploaded and allocated."""
        used, peak = self._ledger.used, self._ledger.peak
        if self._limit is not None:
            return MemoryInfo(self._limit, self._limit - used, used, peak)
        total, free = host_memory()
        return MemoryInfo(total, free, used, peak)

    def upload(
        self,
        source: _Array | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> _Array:
        """Copies; there is one rank, so `partition` cuts nothing."""
        host = source if isinstance(source, np.ndarray) else source.read()
        target = host.dtype if dtype is None else np.dtype(dtype)
        self._reserve(host.size * target.itemsize, "load")
        return self._ledger.hold(np.array(host, dtype=target, order="C", copy=True))

    def download(self, array: _Array) -> _Array:
        """Copies, so that the caller's array does not change under it."""
        return np.array(array, copy=True)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """K and V of every layer; NumPy pads nothing."""
        itemsize = self._kv_dtype(spec).itemsize
        heads = sum(layer.num_kv_heads * layer.head_dim for layer in spec.layers)
        return 2 * heads * spec.block_size * itemsize

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """One array a layer, zeroed."""
        dtype = self._kv_dtype(spec)
        self._reserve(self.kv_block_bytes(spec) * num_blocks, "kv")
        shapes = [
            (num_blocks, spec.block_size, 2 * layer.num_kv_heads, layer.head_dim)
            for layer in spec.layers
        ]
        return [self._ledger.hold(np.zeros(shape, dtype)) for shape in shapes]

    def kv_free(self, kv_d: KV) -> None:
        """Stops counting the layers; NumPy frees them with the caller's list."""
        for layer in kv_d:
            self._ledger.release(layer)

    def kv_read(self, layer: _Array, block_ids: Sequence[int]) -> _Array:
        """Copies blocks to [N, 2, block_size, kv_heads, head_dim]."""
        blocks = layer[np.asarray(block_ids, np.int64)]
        split = blocks.reshape(*blocks.shape[:2], 2, -1, blocks.shape[3])
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3, 4))

    def kv_write(self, layer_d: _Array, block_ids: Sequence[int], data: _Array) -> _Array:
        """Copies blocks from [N, 2, block_size, kv_heads, head_dim]."""
        rows = data.transpose(0, 2, 1, 3, 4)
        layer_d[np.asarray(block_ids, np.int64)] = rows.reshape(-1, *layer_d.shape[1:])
        return layer_d

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> ReferenceStep:
        """Binds the step to its bucket and weights."""
        return ReferenceStep(step, bucket, weights)

    def close(self) -> None:
        """Stops counting everything."""
        self._ledger.clear()

    def _kv_dtype(self, spec: KVSpec) -> np.dtype[Any]:
        if spec.dtype not in _DTYPES:
            raise Unsupported("kv_alloc", spec, f"KV dtype is {spec.dtype}, not one of {_DTYPES}")
        return np.dtype(spec.dtype)

    def _reserve(self, size: int, phase: str) -> None:
        free = self.memory().free
        if size > free:
            raise DeviceOOM(size, free, phase)


class _Ledger:
    """Counts the bytes of live arrays."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0
        self._held: dict[int, weakref.finalize[..., Any]] = {}

    def hold(self, array: _Array) -> _Array:
        """Counts an array until it is released or collected."""
        self.used += array.nbytes
        self.peak = max(self.peak, self.used)
        self._held[id(array)] = weakref.finalize(array, self._drop, id(array), array.nbytes)
        return array

    def release(self, array: _Array) -> None:
        """Stops counting an array; an unknown one is ignored."""
        if id(array) in self._held:
            self._held[id(array)]()

    def clear(self) -> None:
        """Stops counting every array."""
        for finalizer in list(self._held.values()):
            finalizer()

    def _drop(self, key: int, size: int) -> None:
        self.used -= size
        del self._held[key]
