"""The plugin of the platform `torchdev`. torch is imported when the backend is created."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from leadframe.platform import Backend, Detection, Device, Limits, PlatformInfo, hookimpl


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is."""
    return PlatformInfo(
        name="torchdev",
        summary="a torch device through leadframe-torch",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-example-torch-device",
        version="0.1.0",
        kind="test",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """A real device looks for its driver's files here, and opens nothing."""
    if find_spec("torch") is None:
        return Detection((), "torch is not installed")
    return Detection((Device(0, "torch cpu"),), "torch is installed")


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend."""
    from leadframe_example_torch_device.backend import create

    return create()
