"""The six hooks of a Leadframe plugin: three required, three optional.

Hooks find and build objects at start-up. Nothing on the step path calls one. First-party
backends use exactly these hooks; there is no other way in.

A plugin is an entry point in the group ``leadframe`` whose name is the ``--device`` value and
whose object is a module (or any object) that carries ``@hookimpl`` functions. That module must
import no array library: it is imported to list devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from leadframe.platform.backend import Backend
from leadframe.platform.info import (
    ConformanceNotes,
    Detection,
    Device,
    KernelImpl,
    Limits,
    OptionSpec,
    PlatformInfo,
)
from leadframe.platform.version import ENTRY_POINT_GROUP

hookspec = pluggy.HookspecMarker(ENTRY_POINT_GROUP)
hookimpl = pluggy.HookimplMarker(ENTRY_POINT_GROUP)

REQUIRED_HOOKS = ("platform_info", "platform_detect", "platform_create")
OPTIONAL_HOOKS = ("platform_options", "platform_kernels", "platform_conformance")


@hookspec
def platform_info() -> PlatformInfo:  # type: ignore[empty-body]
    """Says what this plugin is, in under 50 ms and without importing an array library."""


@hookspec
def platform_detect(env: Mapping[str, str]) -> Detection:  # type: ignore[empty-body]
    """Finds the devices that are present.

    Called to list devices and before `platform_create`. It must not create a device context,
    must not change the process, and must not raise because a device or driver is absent: it
    returns no devices and a reason.

    Args:
      env: the process environment, read-only; `LEADFRAME_DEVICE` in it is what was asked for,
        wherever that was said, when a device was named.
    """


@hookspec
def platform_create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:  # type: ignore[empty-body]
    """Builds the backend for one device. Called once, in the process that uses it.

    Args:
      device: one of the devices that `platform_detect` returned.
      options: every name of `platform_options` with its checked value.
      limits: what the engine will ask.

    Raises:
      PlatformError: the device cannot be used; the message says why and what to do.
    """


@hookspec
def platform_options() -> Sequence[OptionSpec]:  # type: ignore[empty-body]
    """Lists the `-o KEY=VALUE` options of this platform."""


@hookspec
def platform_kernels(platform: str) -> Sequence[KernelImpl]:  # type: ignore[empty-body]
    """Offers extra kernels for a platform, which may be someone else's.

    Args:
      platform: the name of the platform that was selected.
    """


@hookspec
def platform_conformance() -> ConformanceNotes:  # type: ignore[empty-body]
    """Tells the conformance kit what is known not to work, with reasons."""
