"""A torch device as a backend: its memory, its capabilities, and `TorchBackend`."""

from __future__ import annotations

import torch

from leadframe.platform import Capabilities, MemoryInfo, OpSpec, host_memory
from leadframe_torch import ATTENTION_FEATURES, GraphFactory, Holdings, TorchBackend

_DEVICE = "cpu"
_BLOCK_SIZES = (16, 32)


class Layer:
    """What differs between torch devices; `AcceleratorLayer` serves those that torch knows."""

    device = torch.device(_DEVICE)
    graphs: GraphFactory | None = None

    def memory(self, held: Holdings) -> MemoryInfo:
        """Memory as the device's driver tells it."""
        return MemoryInfo(*host_memory(), held.current, held.peak)

    def synchronize(self) -> None:
        """Waits for all work: this device has no queue."""

    def release_cached(self) -> None:
        """Keeps nothing back."""


def _why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - ATTENTION_FEATURES)
    if unknown:
        return f"attention feature {unknown[0]!r} is not implemented"
    if spec.block_size not in (None, *_BLOCK_SIZES):
        return f"block size {spec.block_size} is not one of {_BLOCK_SIZES}"
    if {spec.dtype, spec.kv_dtype} - {"float32", None}:
        return "only float32 is claimed"
    return None


def create() -> TorchBackend:
    """Builds the backend."""
    caps = Capabilities(
        family="torch",
        block_sizes=_BLOCK_SIZES,
        attention_features=ATTENTION_FEATURES,
        plain_weights=True,
        why_not=_why_not,
    )
    return TorchBackend(Layer(), caps)
