"""`TpuBackend`: the thirteen members of the contract over JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from leadframe.errors import DeviceOOM, Unsupported
from leadframe.platform.backend import (
    KV,
    Array,
    CompiledStep,
    KVLayer,
    KVSpec,
    Partition,
    SplitStep,
    StepFunction,
    WeightRole,
    WeightSource,
)
from leadframe.platform.batch import Bucket
from leadframe.platform.capabilities import Capabilities
from leadframe.platform.info import MemoryInfo
from leadframe.platform.namespace import ArrayNamespace
from leadframe_tpu import kv_cache
from leadframe_tpu.capabilities import capabilities
from leadframe_tpu.failures import compile_errors, device_errors
from leadframe_tpu.kernels.attention import Interpret
from leadframe_tpu.memory import ChipMemory, Ledger, PretendMemory
from leadframe_tpu.namespace import jax_namespace
from leadframe_tpu.op_table import make_ops
from leadframe_tpu.ranks import Ranks
from leadframe_tpu.steps import Programs, TpuStep

QUICK_COMPILE: Final[Mapping[str, Any]] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""For interpreted kernels: a fifth of the time to compile, several times the time to run."""

_MAX_COMPILERS: Final = 8
"""Programs that are compiled at once; each takes a core, and up to a gigabyte of the host."""

_HOLDS: Final = ("float32", "bfloat16", "float16", "int32", "int16", "int8", "uint8", "bool")


class _Memory(Protocol):
    def read(self, ledger: Ledger) -> MemoryInfo: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a backend runs.

    Attributes:
      devices: one a rank.
      interpret: False on chips; how kernels are interpreted elsewhere.
      memory_bytes: what the devices pretend to have when interpreted; None is the host's.
      num_available: devices that one model could use.
    """

    devices: Sequence[Any]
    interpret: Interpret = False
    memory_bytes: int | None = None
    num_available: int = 1

    @property
    def compiler_options(self) -> Mapping[str, Any] | None:
        """Options of XLA."""
        return QUICK_COMPILE if self.interpret else None


class TpuBackend:
    """Serves models on the TPUs of one host.

    Args:
      target: where and how.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ranks = Ranks(target.devices)
        self._caps = capabilities(
            num_devices=target.num_available, is_interpreted=bool(target.interpret)
        )
        self._xp = jax_namespace(self._ranks.replicated)
        self._ledger = Ledger()
        self._memory: _Memory = ChipMemory(self._ranks.devices)
        if target.interpret:
            self._memory = PretendMemory(target.memory_bytes)
        workers = min(_MAX_COMPILERS, len(os.sched_getaffinity(0)))
        self._compilers = ThreadPoolExecutor(workers, "tpu-compile")
        self._programs = Programs(self._ranks, self._compilers, target.compiler_options)
        self._ops = make_ops(
            interpret=target.interpret,
            num_ranks=self._ranks.count,
            compiler_options=target.compiler_options,
        )
        self._ops["kv_copy"] = kv_cache.BlockCopier(self._ranks, target.interpret)

    # --- facts ----------------------------------------------------------------------------

    @property
    def caps(self) -> Capabilities:
        """Static facts."""
        return self._caps

    @property
    def xp(self) -> ArrayNamespace:
        """`jax.numpy`, creating on the device, with `put` and `top_k`."""
        return self._xp

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Every op of the contract."""
        return self._ops

    # --- memory ---------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        """Reads the memory of the chips, summed over them."""
        return self._memory.read(self._ledger)

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array, or each rank's slice of a weight, to the devices."""
        target = _dtype(source, dtype)
        requested = int(np.prod(source.shape)) * target.itemsize
        self._reserve(requested, "load")  # before a byte of it is read
        with device_errors("load", requested, self._free):
            return self._ledger.hold(self._ranks.upload(source, target, partition, role))

    def download(self, array: Array) -> npt.NDArray[Any]:
        """Copies an array to the host; bfloat16 arrives as float32."""
        with device_errors("step", 0, self._free):
            host = np.array(array)
        return host.astype(np.float32) if host.dtype == jnp.bfloat16 else host

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of one block over all layers and chips, lane padding included."""
        return kv_cache.block_bytes(spec, self._ranks)

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates zeroed blocks, one array a layer."""
        if spec.dtype not in self.caps.kv_dtypes:
            offered = ", ".join(self.caps.kv_dtypes)
            raise Unsupported("kv_alloc", spec, f"KV dtype {spec.dtype} is none of {offered}")
        requested = self.kv_block_bytes(spec) * num_blocks
        self._reserve(requested, "kv")
        with device_errors("kv", requested, self._free):
            kv = [kv_cache.new_layer(spec, layer, num_blocks, self._ranks) for layer in spec.layers]
            jax.block_until_ready(kv)
        self._ledger.add(requested)
        return kv

    def kv_free(self, kv_d: KV) -> None:
        """Frees a KV cache, even while someone still holds its handles."""
        for layer in kv_d:
            if not layer.data.is_deleted():
                self._ledger.add(-layer.data.nbytes)
                layer.data.delete()
        kv_d.clear()

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Reads blocks as [N, 2, block_size, kv_heads, head_dim]."""
        with device_errors("step", 0, self._free):
            return kv_cache.read_blocks(layer, block_ids)

    def kv_write(
        self, layer_d: KVLayer, block_ids: Sequence[int], data: npt.NDArray[Any]
    ) -> KVLayer:
        """Writes blocks from [N, 2, block_size, kv_heads, head_dim], in place."""
        with device_errors("step", data.nbytes, self._free):
            return kv_cache.write_blocks(layer_d, block_ids, data)

    # --- steps ----------------------------------------------------------------------------

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Lowers a step, and compiles it ahead of time behind the call.

        A program takes a core of the host up to half a minute, so those of a start are compiled
        side by side. Layers and head are programs of their own, which other buckets share.
        """
        head = None
        with compile_errors(bucket, self._free):
            if isinstance(step, SplitStep):
                forward = self._programs.forward(step, bucket, weights, kv)
                head = self._programs.head(step, bucket, weights, forward.outputs[0])
            else:
                forward = self._programs.whole(step, bucket, weights, kv)
        made = TpuStep(bucket, forward, head, weights, self._ranks, self._ledger, self._free)
        return cast(CompiledStep, made)  # its attributes are properties

    def close(self) -> None:
        """Deletes what was uploaded, and compiles no more."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._ledger.clear()

    def _free(self) -> int:
        return self.memory().free

    def _reserve(self, requested: int, phase: str) -> None:
        free = self._free()
        if requested > free:
            raise DeviceOOM(requested, free, phase)


def _dtype(source: npt.NDArray[Any] | WeightSource, wanted: str | None) -> np.dtype[Any]:
    """Returns the element type on the device.

    Raises:
      Unsupported: JAX would silently make something else of it.
    """
    name = str(source.dtype) if wanted is None else wanted
    if name not in _HOLDS:
        held = ", ".join(_HOLDS)
        raise Unsupported("upload", name, f"this backend holds {held}; ask for one of them")
    return np.dtype(jnp.dtype(name))
