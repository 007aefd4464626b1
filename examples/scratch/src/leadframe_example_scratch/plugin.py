"""The plugin of the platform `scratch`. It is imported to list devices: no array library here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadframe.platform import (
    Backend,
    Detection,
    Device,
    Limits,
    PlatformInfo,
    hookimpl,
)


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is: literals only."""
    return PlatformInfo(
        name="scratch",
        summary="a backend written from scratch on NumPy",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-example-scratch",
        version="0.1.0",
        kind="test",  # "accelerator" lets `--device auto` choose it
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """Finds the devices: looks at files or the PCI bus, opens nothing, never raises."""
    return Detection((Device(0, "NumPy"),), "NumPy is always present")


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend, in the process that uses it."""
    from leadframe_example_scratch.backend import ScratchBackend

    return ScratchBackend()
