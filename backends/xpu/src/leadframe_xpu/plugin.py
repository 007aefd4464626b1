"""The hooks of the Intel platform. Listing devices imports no array library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadframe.platform.backend import Backend
from leadframe.platform.capabilities import OpSpec
from leadframe.platform.hookspecs import hookimpl
from leadframe.platform.info import (
    Detection,
    Device,
    KernelImpl,
    Limits,
    OptionSpec,
    PlatformInfo,
)
from leadframe_xpu.detection import detect, render_nodes
from leadframe_xpu.installed import read_installed
from leadframe_xpu.ranking import ORDER, rank

NAME = "xpu"


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is.

    Where IPEX's CPU build is all there is, `auto` must not take the host for an accelerator.
    """
    is_host_only = rank(read_installed(), "host").used is not None and not render_nodes()
    return PlatformInfo(
        name=NAME,
        summary="Intel GPUs, through vllm-xpu-kernels, IPEX, Triton or torch",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-xpu",
        version="0.1.0",
        kind="test" if is_host_only else "accelerator",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """Looks for render nodes of Intel GPUs, and for IPEX's CPU build."""
    return detect(env, read_installed())


@hookimpl
def platform_options() -> Sequence[OptionSpec]:
    """Lists the options."""
    return (
        OptionSpec(
            "target",
            str,
            "gpu",
            "host runs the kernels of IPEX's CPU build on this machine's processor",
            ("gpu", "host"),
        ),
        OptionSpec(
            "kernels", str, "auto", "which attention kernels; auto takes the best", ("auto", *ORDER)
        ),
        OptionSpec(
            "ipex_decode",
            str,
            "varlen",
            "which IPEX call serves decodes on the host; both give the same tokens",
            ("varlen", "single_query"),
        ),
        OptionSpec(
            "graphs",
            str,
            "auto",
            "off runs steps eagerly where torch has XPU graphs",
            ("auto", "off"),
        ),
    )


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend; IPEX is imported here and nowhere else."""
    from leadframe_xpu.create import create_backend

    return create_backend(device, options, read_installed())


@hookimpl
def platform_kernels(platform: str) -> Sequence[KernelImpl]:
    """Offers torch's operators for what the native kernels refuse, such as a head dimension."""
    if platform != NAME:
        return ()
    return (KernelImpl("attention", "torch", _torch_attention, _torch_why_not, priority=-1),)


def _torch_why_not(spec: OpSpec) -> str | None:
    unknown = sorted(spec.features - {"window", "softcap"})
    return f"it does not implement {', '.join(unknown)}" if unknown else None


def _torch_attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
    from leadframe_torch import attention

    return attention.attention(q, kv, getattr(plan, "torch", plan), params)
