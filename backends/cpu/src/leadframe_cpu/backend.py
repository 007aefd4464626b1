"""The CPU backend: torch on the host."""

from __future__ import annotations

import torch

from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe_cpu.cpu_info import cpu_info
from leadframe_cpu.memory import HostLayer
from leadframe_torch import ATTENTION_FEATURES, CompileMode, TorchBackend

_DTYPES = ("float32", "bfloat16")


def _why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - ATTENTION_FEATURES)
    if unknown:
        known = " and ".join(sorted(ATTENTION_FEATURES))
        return f"attention feature {unknown[0]!r} is not implemented; there are {known}"
    for dtype in (spec.dtype, spec.kv_dtype):
        if dtype is not None and dtype not in _DTYPES:
            return f"dtype {dtype} is not implemented; there are {' and '.join(_DTYPES)}"
    return None


def _capabilities() -> Capabilities:
    return Capabilities(
        family="torch",
        compute_dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        block_sizes=(16, 32, 64, 128, 8, 4, 1),
        attention_features=ATTENTION_FEATURES,
        why_not=_why_not,
    )


class CpuBackend(TorchBackend):
    """Serves models on the host.

    Args:
      threads: cores that ops may use at once.
      compile_mode: as in `TorchBackend`.
    """

    def __init__(self, threads: int, compile_mode: CompileMode = "eager") -> None:
        torch.set_num_threads(threads)
        super().__init__(HostLayer(), _capabilities(), compile_mode=compile_mode)
        self.cpu = cpu_info()
