"""Group A: plugins that do to the process what they must not."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from leadframe.platform import Backend, Detection, Device, PlatformInfo, hookimpl
from leadframe_sim.mutants.base import Mutant

_INFO = PlatformInfo("mutant", "broken on purpose", (1, 0), (1, 0), "leadframe-sim", "0", "test")
_held: list[Any] = []


def _create(device: Device, options: Mapping[str, Any], limits: Any) -> Backend:
    from leadframe.platform.reference.backend import ReferenceBackend

    return ReferenceBackend()


def _detect(env: Mapping[str, str]) -> Detection:
    return Detection((Device(0, "mutant"),), "always")


def stub_plugin(**changes: Callable[..., Any]) -> types.SimpleNamespace:
    """Makes a plugin of the NumPy backend, with some hooks replaced."""
    hooks: dict[str, Callable[..., Any]] = {
        "platform_info": lambda: _INFO,
        "platform_detect": _detect,
        "platform_create": _create,
    }
    marked = {name: hookimpl(hook) for name, hook in {**hooks, **changes}.items()}
    return types.SimpleNamespace(**marked)


def _patching_create(device: Device, options: Mapping[str, Any], limits: Any) -> Backend:
    import numpy as np

    original = np.matmul
    numpy: Any = np
    numpy.matmul = lambda *args, **kwargs: original(*args, **kwargs)
    return _create(device, options, limits)


def _core_patching_create(device: Device, options: Mapping[str, Any], limits: Any) -> Backend:
    from leadframe.platform import batch

    original = batch.unpack
    batch.unpack = lambda *args: original(*args)
    return _create(device, options, limits)


def _engine_create(device: Device, options: Mapping[str, Any], limits: Any) -> Backend:
    import importlib

    importlib.import_module("leadframe.engine")
    return _create(device, options, limits)


def _heavy_info() -> PlatformInfo:
    sys.modules.setdefault("cupy", types.ModuleType("cupy"))
    return _INFO


def _slow_info() -> PlatformInfo:
    time.sleep(0.1)
    return _INFO


def _opening_detect(env: Mapping[str, str]) -> Detection:
    _held.append(open("/dev/ptmx", "rb"))  # noqa: SIM115 - the fault
    return _detect(env)


patches_numpy = stub_plugin(platform_create=_patching_create)
patches_core = stub_plugin(platform_create=_core_patching_create)
imports_engine = stub_plugin(platform_create=_engine_create)
heavy_info = stub_plugin(platform_info=_heavy_info)
slow_info = stub_plugin(platform_info=_slow_info)
opens_device = stub_plugin(platform_detect=_opening_detect)
good = stub_plugin()


def _one(name: str, attribute: str, summary: str) -> Mutant:
    return Mutant(name, "A", summary, plugin=f"{__name__}:{attribute}")


MUTANTS = [
    _one("patches-numpy", "patches_numpy", "replaces a function of NumPy"),
    _one("patches-core", "patches_core", "replaces a function of the core"),
    _one("imports-engine", "imports_engine", "imports the engine"),
    _one("heavy-info", "heavy_info", "imports an array library to say its name"),
    _one("slow-info", "slow_info", "takes 100 ms to say its name"),
    _one("opens-device", "opens_device", "opens a device while it detects"),
]
