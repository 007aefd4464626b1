"""Group C: memory that is not what the backend says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from leadframe.platform import KV, KVSpec, MemoryInfo
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe_sim.mutants.base import Mutant, OpMutant


class _LeaksOnFree(ReferenceBackend):
    def kv_free(self, kv_d: KV) -> None:
        super().kv_free(kv_d)
        self.kept = [*getattr(self, "kept", []), self.upload(np.zeros(1 << 12, np.float32))]


class _HalfTheBytes(ReferenceBackend):
    def kv_block_bytes(self, spec: KVSpec) -> int:
        return super().kv_block_bytes(spec) // 2

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        return super().kv_alloc(spec, num_blocks)


class _SwallowsOOM(ReferenceBackend):
    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        return super().kv_alloc(spec, min(num_blocks, 64))


class _ForeignOOM(ReferenceBackend):
    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        try:
            return super().kv_alloc(spec, num_blocks)
        except Exception as error:
            raise MemoryError("no memory") from error


class _NotZeroed(ReferenceBackend):
    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        kv = super().kv_alloc(spec, num_blocks)
        for layer in kv:
            layer[-1] = 1e-3
        return kv


class _SortsIds(ReferenceBackend):
    def kv_read(self, layer: Any, block_ids: Sequence[int]) -> Any:
        return super().kv_read(layer, sorted(block_ids))


class _SwapsKV(ReferenceBackend):
    def kv_read(self, layer: Any, block_ids: Sequence[int]) -> Any:
        return super().kv_read(layer, block_ids)[:, ::-1]


class _OneLayer(ReferenceBackend):
    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        kv = super().kv_alloc(spec, num_blocks)
        return [kv[i % 2] for i in range(len(kv))]


class _AliasesUploads(ReferenceBackend):
    def upload(
        self, source: Any, dtype: Any = None, partition: Any = None, role: Any = "tensor"
    ) -> Any:
        if isinstance(source, np.ndarray) and dtype in (None, str(source.dtype)):
            self._ledger.hold(view := source.view())
            return view
        return super().upload(source, dtype, partition, role)


class _AliasesDownloads(ReferenceBackend):
    def download(self, array: Any) -> Any:
        return array


class _StrangeMemory(ReferenceBackend):
    def memory(self) -> MemoryInfo:
        return replace(super().memory(), used=1000, peak=1000)


class _FallingPeak(ReferenceBackend):
    def memory(self) -> MemoryInfo:
        found = super().memory()
        return replace(found, peak=found.used)


def _one(name: str, summary: str, make: Callable[[], Any]) -> Mutant:
    return Mutant(name, "C", summary, make)


def _copies_first_only(op: Any) -> Any:
    return lambda kv_d, src, dst: op(kv_d, src[:1], dst[:1])


MUTANTS = [
    _one("leaks-on-free", "keeps 16 KiB for each kv_free", _LeaksOnFree),
    _one("half-the-bytes", "kv_block_bytes tells half", _HalfTheBytes),
    _one("swallows-oom", "returns a smaller pool instead of DeviceOOM", _SwallowsOOM),
    _one("foreign-oom", "raises MemoryError instead of DeviceOOM", _ForeignOOM),
    _one("kv-not-zeroed", "fresh KV holds something", _NotZeroed),
    _one("kv-read-sorts", "kv_read sorts the block ids", _SortsIds),
    _one("kv-read-swaps", "kv_read returns V before K", _SwapsKV),
    _one("layers-alias", "layers share their memory", _OneLayer),
    _one("upload-aliases", "upload keeps the host's memory", _AliasesUploads),
    _one("download-aliases", "download returns device memory", _AliasesDownloads),
    _one("constant-memory", "memory().used never changes", _StrangeMemory),
    _one("falling-peak", "memory().peak goes down", _FallingPeak),
    _one(
        "copies-one-block",
        "kv_copy copies the first block only",
        lambda: OpMutant({"kv_copy": _copies_first_only}),
    ),
]
