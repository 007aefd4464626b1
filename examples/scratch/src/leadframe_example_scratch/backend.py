"""The backend of the platform `scratch`: thirteen members, three ops, and a KV layout of its own.

Everything that is not here comes from the reference ops, which run over `xp` on the device.
Replace an op when a profile says so: add it to `_OPS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as xnp
import numpy as np
import numpy.typing as npt

from leadframe.platform import (
    KV,
    OP_NAMES,
    ArrayNamespace,
    AttnParams,
    Bucket,
    Capabilities,
    DeviceOOM,
    KVSpec,
    MemoryInfo,
    OpSpec,
    Partition,
    StepArrays,
    StepBatch,
    StepFunction,
    Unsupported,
    WeightRole,
    WeightSource,
    host_memory,
    unpack,
)

Array = npt.NDArray[Any]

_FEATURES = frozenset({"window", "softcap"})
_BLOCK_SIZES = (16, 32)


@dataclass(slots=True)
class KVLayer:
    """One layer's cache: K and V, each [num_blocks, block_size, kv_heads, head_dim]."""

    k: Array
    v: Array


def kv_append(kv_d: KVLayer, k: Array, v: Array, plan: StepArrays) -> KVLayer:
    """Writes K and V [T, K, D] to their slots; padding has slot 0, in the null block."""
    block, offset = np.divmod(plan.slots, kv_d.k.shape[1])
    kv_d.k[block, offset], kv_d.v[block, offset] = k, v
    return kv_d


def kv_copy(kv_d: KVLayer, src: Array, dst: Array) -> KVLayer:
    """Copies whole blocks."""
    kv_d.k[dst], kv_d.v[dst] = kv_d.k[src], kv_d.v[src]
    return kv_d


def attention(q: Array, kv: KVLayer, plan: StepArrays, params: AttnParams) -> Array:
    """Causal attention of q [T, H, D], one row at a time; padded tokens get zeros."""
    out = np.zeros_like(q)
    decodes = plan.bucket.num_decodes
    for row in np.flatnonzero(plan.seq_lens):
        # a decode row owns its token; chunk rows have theirs in query_start
        first, last = (row, row + 1) if row < decodes else plan.query_start[row : row + 2]
        if last > first:
            length = int(plan.seq_lens[row])
            blocks = plan.block_table[row, : -(-length // kv.k.shape[1])]
            out[first:last] = _attend(q[first:last], kv, blocks, length, params)
    return out


def _attend(q: Array, kv: KVLayer, blocks: Array, length: int, params: AttnParams) -> Array:
    """Queries [Q, H, D] at the end of a sequence of `length` tokens."""
    num_q, heads, dim = q.shape
    oldest = 0 if params.window is None else max(0, length - num_q - params.window + 1)
    # only slots that are read: masking does not stop a NaN
    k, v = (part[blocks].reshape(-1, *part.shape[2:])[oldest:length] for part in (kv.k, kv.v))
    groups = heads // k.shape[1]
    q = q.reshape(num_q, k.shape[1], groups, dim).transpose(1, 2, 0, 3)
    scores = q @ k.transpose(1, 2, 0)[:, None] * params.scale
    if params.softcap is not None:
        scores = params.softcap * np.tanh(scores / params.softcap)
    ahead = np.arange(oldest, length) - np.arange(length - num_q, length)[:, None]
    hidden = ahead > 0 if params.window is None else (ahead > 0) | (ahead <= -params.window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v.transpose(1, 0, 2)[:, None]
    return np.asarray(out.transpose(2, 0, 1, 3).reshape(num_q, heads, dim))


_OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (kv_append, attention, kv_copy)}


def _put(buf: Array, rows: Array, cols: Array, values: Array) -> Array:
    buf[rows, cols] = values
    return buf


def _top_k(x: Array, k: int) -> tuple[Array, Array]:
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, axis=-1), order.astype(np.int32)


_XP = ArrayNamespace(xnp, put=_put, top_k=_top_k)


def _why_not(spec: OpSpec) -> str | None:
    """Says why an op cannot be served: what is not claimed must be refused."""
    unknown = sorted(spec.features - _FEATURES)
    if unknown:
        return f"attention feature {unknown[0]!r} is not implemented"
    if spec.op not in OP_NAMES:
        return f"there is no op {spec.op!r}"
    if spec.block_size not in (None, *_BLOCK_SIZES):
        return f"block size {spec.block_size} is not one of {_BLOCK_SIZES}"
    if {spec.dtype, spec.kv_dtype} - {"float32", None}:
        return "only float32 is implemented"
    return None


_CAPS = Capabilities(
    family="numpy",
    block_sizes=_BLOCK_SIZES,
    attention_features=_FEATURES,
    deterministic=True,
    plain_weights=True,
    why_not=_why_not,
)


@dataclass(slots=True)
class Step:
    """A step that runs as it is; a device with graphs captures here."""

    step: StepFunction
    bucket: Bucket
    weights: Mapping[str, Any]
    bytes: int = 0
    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    cache_hit: bool | None = None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Any], KV]:
        """Uploads the packed batch (here: copies it) and runs the step."""
        arrays = unpack(self.bucket, batch.ints.copy(), batch.floats.copy())
        with np.errstate(all="ignore"):  # one request may overflow; the engine checks its logits
            return self.step(self.weights, kv_d, arrays)

    def close(self) -> None:
        """Holds nothing."""


class ScratchBackend:
    """The thirteen members."""

    caps = _CAPS
    xp = _XP
    ops: Mapping[str, Callable[..., Any]] = _OPS

    def __init__(self) -> None:
        self._used = 0
        self._peak = 0
        self._held: dict[int, weakref.finalize[..., Any]] = {}

    def memory(self) -> MemoryInfo:
        """Total, free, used and peak bytes."""
        return MemoryInfo(*host_memory(), self._used, self._peak)

    def upload(
        self,
        source: Array | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array or a weight to the device."""
        host = source if isinstance(source, np.ndarray) else source.read()
        target = host.dtype if dtype is None else np.dtype(dtype)
        self._reserve(host.size * target.itemsize, "load")
        return self._hold(np.array(host, target, order="C"))

    def download(self, array: Array) -> Array:
        """Copies to the host, waiting for the work that produces the array."""
        return np.array(array)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """What one block costs over all layers."""
        if spec.dtype != "float32":
            raise Unsupported("kv_alloc", spec, "only float32 is implemented")
        elements = sum(layer.num_kv_heads * layer.head_dim for layer in spec.layers)
        return 2 * 4 * elements * spec.block_size

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Zeroed blocks, one handle a layer."""
        self._reserve(self.kv_block_bytes(spec) * num_blocks, "kv")
        new, front = self._hold, (num_blocks, spec.block_size)
        shapes = [(*front, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        return [KVLayer(new(np.zeros(s, np.float32)), new(np.zeros(s, np.float32))) for s in shapes]

    def kv_free(self, kv_d: KV) -> None:
        """Gives the layers back."""
        for layer in kv_d:
            for array in (layer.k, layer.v):
                if id(array) in self._held:
                    self._held[id(array)]()

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> Array:
        """Copies blocks to the canonical layout [N, 2, block_size, kv_heads, head_dim]."""
        return np.stack([layer.k[list(block_ids)], layer.v[list(block_ids)]], axis=1)

    def kv_write(self, layer_d: KVLayer, block_ids: Sequence[int], data: Array) -> KVLayer:
        """Copies blocks from the canonical layout."""
        layer_d.k[list(block_ids)], layer_d.v[list(block_ids)] = data[:, 0], data[:, 1]
        return layer_d

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        capture: bool = True,
    ) -> Step:
        """Makes a step ready for a bucket."""
        return Step(step, bucket, weights)

    def close(self) -> None:
        """Frees everything."""
        for finalizer in list(self._held.values()):
            finalizer()

    def _reserve(self, size: int, phase: str) -> None:
        free = self.memory().free
        if size > free:
            raise DeviceOOM(size, free, phase)

    def _hold(self, array: Array) -> Array:
        self._used += array.nbytes
        self._peak = max(self._peak, self._used)
        self._held[id(array)] = weakref.finalize(array, self._drop, id(array), array.nbytes)
        return array

    def _drop(self, key: int, size: int) -> None:
        self._used -= size
        del self._held[key]
