"""The hooks of the TPU platform. Listing devices imports no array library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadframe.platform.backend import Backend
from leadframe.platform.hookspecs import hookimpl
from leadframe.platform.info import (
    ConformanceNotes,
    Detection,
    Device,
    Limits,
    OptionSpec,
    PlatformInfo,
)
from leadframe_tpu.detect import detect


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is."""
    return PlatformInfo(
        name="tpu",
        summary="Google TPUs, through JAX and Pallas",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-tpu",
        version="0.1.0",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """Looks at the PCI bus; the interpreter is there only when it is named."""
    return detect(env)


@hookimpl
def platform_options() -> Sequence[OptionSpec]:
    """Lists the options."""
    return (
        OptionSpec(
            "compile_cache",
            str,
            "auto",
            "folder that keeps compiled steps, or off; auto is ~/.cache/leadframe/tpu on chips",
        ),
        OptionSpec(
            "memory_bytes",
            _size,
            None,
            "what interpreted devices pretend to have; the default is the host's",
        ),
    )


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be a positive number of bytes")
    return value


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend; JAX is imported here and nowhere else."""
    from leadframe_tpu.create import create_backend

    return create_backend(device, options, limits)


@hookimpl
def platform_conformance() -> ConformanceNotes:
    """Nothing is known not to work."""
    return ConformanceNotes()
