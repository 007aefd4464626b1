"""The ROCm platform: the shared GPU plugin, told about AMD."""

from __future__ import annotations

from typing import Final

from leadframe_rocm.kfd import find
from leadframe_triton.plugin import GpuPlugin, TorchBuild

PLUGIN: Final = GpuPlugin(
    name="rocm",
    summary="AMD GPUs, with Triton kernels",
    distribution="leadframe-rocm",
    version="0.1.0",
    find=find,
    build=TorchBuild(
        library="libtorch_hip.so",
        remedy="install a ROCm build of torch, as https://pytorch.org/get-started describes",
    ),
)
"""What the entry point `rocm` names."""
