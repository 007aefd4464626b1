"""Creates the backend for a device: on chips, or interpreted on the host."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from leadframe.errors import ConfigError, DeviceNotFound
from leadframe.platform.info import Device, Limits
from leadframe_tpu import cache
from leadframe_tpu.backend import Target, TpuBackend
from leadframe_tpu.detect import INTERPRETED
from leadframe_tpu.failures import first_line

logger = logging.getLogger(__name__)


def create_backend(device: Device, options: Mapping[str, Any], limits: Limits) -> TpuBackend:
    """Builds a backend.

    Raises:
      ConfigError: the folder for compiled steps cannot be made.
      DeviceNotFound: there is no TPU, or not enough of them.
    """
    is_interpreted = device.arch == INTERPRETED.arch
    _set_cache(options.get("compile_cache", "auto"), is_interpreted)
    if is_interpreted:
        return TpuBackend(_interpreter(limits, options.get("memory_bytes")))
    return TpuBackend(_chips(device, limits))


def _set_cache(setting: str, is_interpreted: bool) -> None:
    """Leaves a folder alone that the user already set for JAX.

    Raises:
      ConfigError: the folder that the user named cannot be made.
    """
    if setting == "off" or (setting == "auto" and (is_interpreted or cache.is_cache_used())):
        return
    folder = cache.default_folder(os.environ) if setting == "auto" else Path(setting)
    try:
        cache.use_folder(folder)
    except OSError as error:
        if setting != "auto":
            raise ConfigError(f"-o compile_cache={setting} cannot be used: {error}") from error
        logger.warning("every start compiles every step: none can be kept in a folder: %s", error)


def _chips(device: Device, limits: Limits) -> Target:
    try:
        found = jax.devices("tpu")
    except RuntimeError as error:
        raise DeviceNotFound(f"JAX cannot open the TPU: {first_line(str(error))}") from error
    return Target(_take(found, device.index, limits.tensor_parallel_size), num_available=len(found))


def _interpreter(limits: Limits, memory_bytes: int | None) -> Target:
    """The host as so many devices: JAX splits it if it is asked before it starts."""
    count = limits.tensor_parallel_size
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if count > 1:
        with suppress(RuntimeError):  # JAX has started: the host is split as it is split
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    return Target(
        _take(found, 0, count),
        interpret=True,
        memory_bytes=memory_bytes,
        num_available=len(found),
    )


def _take(devices: Sequence[Any], first: int, count: int) -> Sequence[Any]:
    taken = devices[first : first + count]
    if len(taken) < count:
        raise DeviceNotFound(
            f"--tensor-parallel-size is {count}; from device {first} on there are {len(taken)} of "
            f"{len(devices)}; lower it or choose another device"
        )
    return taken
