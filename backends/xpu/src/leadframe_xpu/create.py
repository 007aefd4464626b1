"""From a device and options to a backend: opens the device and imports the libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from leadframe.errors import DeviceNotFound
from leadframe.platform.info import Device
from leadframe_torch import AcceleratorLayer, DeviceLayer, HostLayer, ModuleGraphs
from leadframe_xpu import libraries
from leadframe_xpu.backend import XpuBackend
from leadframe_xpu.detection import HOST_ARCH
from leadframe_xpu.installed import Installed
from leadframe_xpu.ipex_kernels import HOST, XPU, IpexKernels
from leadframe_xpu.native import NativeKernels
from leadframe_xpu.ranking import KernelName, Target, rank
from leadframe_xpu.vllm_kernels import VllmKernels

Options = Mapping[str, Any]


def create_backend(device: Device, options: Options, installed: Installed) -> XpuBackend:
    """Builds the backend.

    Args:
      device: what detection found.
      options: checked values of `platform_options`.
      installed: what there is to choose from.

    Raises:
      DeviceNotFound: there is no such device, or torch cannot open it.
      Unsupported: the kernels asked for cannot serve.
      PluginLoadError: a library did not import.
    """
    target: Target = "host" if options.get("target") == "host" else "gpu"
    ranking = rank(installed, target, options.get("kernels", "auto"))
    if target == "gpu" and device.arch == HOST_ARCH:
        raise DeviceNotFound(
            f"--device xpu found no Intel GPU that torch could use: {ranking.summary()}. "
            "IPEX's CPU build can run its kernels on the host: add -o target=host"
        )
    if ranking.used is None:
        raise DeviceNotFound(f"nothing serves --device xpu on the {target}: {ranking.summary()}")
    layer = HostLayer() if target == "host" else _gpu_layer(device.index, options)
    return XpuBackend(layer, _KERNELS[ranking.used](layer, options), ranking)


def _gpu_layer(index: int, options: Options) -> AcceleratorLayer:
    """Opens an Intel GPU.

    Raises:
      DeviceNotFound: torch does not see it.
    """
    count = torch.xpu.device_count() if torch.xpu.is_available() else 0
    if index >= count:
        raise DeviceNotFound(
            f"torch {torch.__version__} sees {count} Intel GPUs, none with index {index}; check "
            "Intel's compute runtime (intel-level-zero-gpu), the render group, ZE_AFFINITY_MASK"
        )
    device = torch.device("xpu", index)
    has_graphs = hasattr(torch.xpu, "XPUGraph") and options.get("graphs", "auto") == "auto"
    return AcceleratorLayer(device, ModuleGraphs(device, "XPUGraph") if has_graphs else None)


def _vllm(layer: DeviceLayer, options: Options) -> NativeKernels:
    return VllmKernels(libraries.load_vllm_kernels())


def _ipex(layer: DeviceLayer, options: Options) -> NativeKernels:
    convention = HOST if layer.device.type == "cpu" else XPU
    return IpexKernels(libraries.load_ipex(), convention, options.get("ipex_decode", "varlen"))


def _triton(layer: DeviceLayer, options: Options) -> NativeKernels:
    from leadframe_xpu.triton_kernels import TritonKernels, intel_context

    return TritonKernels(intel_context(layer.device))


def _torch(layer: DeviceLayer, options: Options) -> NativeKernels | None:
    return None


_KERNELS: Final[dict[KernelName, Callable[[DeviceLayer, Options], NativeKernels | None]]] = {
    "vllm-xpu-kernels": _vllm,
    "ipex": _ipex,
    "triton": _triton,
    "torch": _torch,
}
