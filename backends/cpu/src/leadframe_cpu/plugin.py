"""The plugin of the host processor. Imports no array library until a backend is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from leadframe.platform.backend import Backend
from leadframe.platform.hookspecs import hookimpl
from leadframe.platform.info import Detection, Device, Limits, OptionSpec, PlatformInfo
from leadframe_cpu.cpu_info import cpu_info, usable_cores


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is."""
    return PlatformInfo(
        name="cpu",
        summary="the host processor, through torch",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-cpu",
        version="0.1.0",
        kind="host",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """The host is there whenever torch is installed."""
    if find_spec("torch") is None:
        return Detection((), "torch is not installed; run: pip install torch")
    from leadframe.platform.host_memory import host_memory

    info = cpu_info()
    total, _ = host_memory()
    device = Device(0, info.name, memory_bytes=total, arch=info.arch)
    return Detection((device,), f"{usable_cores()} cores of {info.name}")


@hookimpl
def platform_options() -> Sequence[OptionSpec]:
    """Lists the options."""
    modes, native = ("eager", "step"), ("auto", "on", "off")
    return (
        OptionSpec(
            "threads", _threads, None, "worker threads of a rank; the default is every core"
        ),
        OptionSpec("compile", str, "eager", "step: torch.compile for each bucket", modes),
        OptionSpec("native", str, "auto", "kernels compiled with the host's C++ compiler", native),
    )


def _threads(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend."""
    from leadframe_cpu.backend import CpuBackend
    from leadframe_torch import Rank

    share = max(1, usable_cores() // limits.tensor_parallel_size)
    return CpuBackend(
        threads=options.get("threads") or share,
        compile_mode=options.get("compile", "eager"),
        native=options.get("native", "auto"),
        rank=Rank.of(limits),
    )
