"""The plugin of the simulated device: an ordinary one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadframe.platform import (
    Backend,
    Detection,
    Device,
    Limits,
    OptionSpec,
    PlatformInfo,
    hookimpl,
)

_GRAPHS = {"queue": "record", "compile": "compile", "nograph": "none"}
_DEFAULT_BYTES = 2 << 30


@hookimpl
def platform_info() -> PlatformInfo:
    """Says what this plugin is."""
    return PlatformInfo(
        name="sim",
        summary="a simulated accelerator; numbers say nothing about silicon",
        contract=(1, 0),
        min_contract=(1, 0),
        distribution="leadframe-sim",
        version="0.1.0",
        kind="test",
    )


@hookimpl
def platform_detect(env: Mapping[str, str]) -> Detection:
    """One device per behaviour, unless the environment hides them."""
    if env.get("LEADFRAME_SIM_ABSENT"):
        return Detection((), "LEADFRAME_SIM_ABSENT is set")
    devices = [Device(i, name, _DEFAULT_BYTES) for i, name in enumerate(_GRAPHS)]
    return Detection(tuple(devices), "simulated, always present")


@hookimpl
def platform_options() -> Sequence[OptionSpec]:
    """Lists the options."""
    return (
        OptionSpec("memory_bytes", _positive, _DEFAULT_BYTES, "bytes of simulated memory"),
        OptionSpec("latency_us", float, 0.0, "microseconds that a kernel takes"),
        OptionSpec("fail", _failure, None, "KIND@N: oom, lost or bug at the N-th kernel launch"),
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def _failure(text: str) -> tuple[str, int]:
    kind, _, at = text.partition("@")
    if kind not in ("oom", "lost", "bug") or not at.isdigit():
        raise ValueError("it must be oom@N, lost@N or bug@N")
    return kind, int(at)


@hookimpl
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
    """Builds the backend."""
    from leadframe_sim.backend import SimBackend
    from leadframe_sim.device import Failure, SimDevice

    failure = options.get("fail")
    simulated = SimDevice(
        total=options.get("memory_bytes", _DEFAULT_BYTES),
        latency=options.get("latency_us", 0.0) * 1e-6,
        failure=None if failure is None else Failure(*failure),
    )
    return SimBackend(simulated, _GRAPHS[device.name])  # type: ignore[arg-type]
