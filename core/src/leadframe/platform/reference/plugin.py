"""The plugin of the NumPy backend. It uses the same hooks as every other one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadframe.platform.backend import Backend
from leadframe.platform.hookspecs import hookimpl
from leadframe.platform.info import Detection, Device, Limits, OptionSpec, PlatformInfo


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is."""
    return PlatformInfo(
        name="reference",
        summary="NumPy, the definition of every op; for tests and comparison",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe",
        version="0.1.0",
        kind="test",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """There is always one."""
    return Detection((Device(0, "NumPy"),), "part of leadframe")


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend."""
    from leadframe.platform.reference.backend import ReferenceBackend

    return ReferenceBackend(memory_bytes=options.get("memory_bytes"))


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be a positive number of bytes")
    return value


@hookimpl
def platform_options() -> Sequence[OptionSpec]:
    """Lists the options."""
    about = "pretend that the device has this many bytes; the default is what the host has"
    return (OptionSpec("memory_bytes", _size, None, about),)
