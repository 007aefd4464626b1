"""The CUDA platform: the shared GPU plugin, told about NVIDIA."""

from __future__ import annotations

from typing import Final

from leadframe_cuda.nvml import find
from leadframe_triton.plugin import GpuPlugin, TorchBuild

PLUGIN: Final = GpuPlugin(
    name="cuda",
    summary="NVIDIA GPUs, with Triton kernels",
    distribution="leadframe-cuda",
    version="0.1.0",
    find=find,
    build=TorchBuild(
        library="libtorch_cuda.so",
        remedy="install a CUDA build of torch: pip install --force-reinstall torch",
    ),
)
"""What the entry point `cuda` names."""
