"""The hooks of a GPU platform, written once: CUDA and ROCm differ in what they are called with.

Listing devices imports no array library; only `platform_create` does.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from leadframe.errors import DeviceNotFound
from leadframe.platform.backend import Backend
from leadframe.platform.hookspecs import hookimpl
from leadframe.platform.info import Detection, Device, Limits, OptionSpec, PlatformInfo
from leadframe_triton import interpreter
from leadframe_triton.arch import ARCHS, INTERPRETER

INTERPRETED: Final = Device(0, "interpreter", arch=INTERPRETER.name)
"""The device that stands for Triton's interpreter on the host."""

_TRUE: Final = ("1", "true", "on", "yes")
_FALSE: Final = ("0", "false", "off", "no")


@dataclass(frozen=True, slots=True)
class Found:
    """What a vendor's own interfaces tell about its devices.

    Attributes:
      devices: visible devices, numbered as torch numbers them, with their architecture.
      reason: why there is none; empty otherwise.
    """

    devices: tuple[Device, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Which build of torch a vendor's devices need.

    Attributes:
      library: a file in torch's `lib` folder that only this build has.
      remedy: how to install it.
    """

    library: str
    remedy: str

    def why_not(self) -> str | None:
        """Why the installed torch cannot drive the devices; None when it can."""
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return f"torch is not installed; {self.remedy}"
        if Path(spec.submodule_search_locations[0], "lib", self.library).exists():
            return None
        version = importlib.metadata.version("torch")
        return f"torch {version} was built without support for it; {self.remedy}"


class GpuPlugin:
    """One vendor's platform.

    Args:
      name: the `--device` value.
      summary: one line for people.
      distribution: the distribution that pip knows.
      version: its version.
      find: lists the devices; must not create a context or import an array library.
      build: the torch build that they need.
    """

    def __init__(
        self,
        *,
        name: str,
        summary: str,
        distribution: str,
        version: str,
        find: Callable[[Mapping[str, str]], Found],
        build: TorchBuild,
    ) -> None:
        self._info = PlatformInfo(
            name=name,
            summary=summary,
            contract=(1, 0),
            min_contract=(1, 0),
            distribution=distribution,
            version=version,
        )
        self._find, self._build = find, build

    @hookimpl
    def platform_info(self) -> PlatformInfo:
        """Says what this plugin is."""
        return self._info

    @hookimpl
    def platform_detect(self, env: Mapping[str, str]) -> Detection:
        """Lists the GPUs; the interpreter only where it is asked for by name or by its switch."""
        if self._is_interpreted(env):
            return Detection((INTERPRETED,), "kernels run in Triton's interpreter on the host")
        found = self._find(env)
        if not found.devices:
            return Detection((), found.reason + self._hint(env))
        names = ", ".join(sorted({device.name for device in found.devices}))
        served = tuple(d for d in found.devices if d.arch.split(":")[0] in ARCHS)
        if not served:
            known = ", ".join(name for name in ARCHS if name != INTERPRETER.name)
            archs = ", ".join(sorted({device.arch for device in found.devices}))
            return Detection((), f"{names} is {archs}; the kernels are prepared for {known}")
        reason = self._build.why_not()
        if reason:
            return Detection((), f"{names} is present, but {reason}")
        return Detection(served, f"{len(served)} x {names}")

    def _hint(self, env: Mapping[str, str]) -> str:
        """What else to try, for someone who asked for this platform and no device of it."""
        name = self._info.name
        if env.get("LEADFRAME_DEVICE") != name:
            return ""
        return f"; {name}:{INTERPRETED.name} interprets its kernels on the host, for tests"

    def _is_interpreted(self, env: Mapping[str, str]) -> bool:
        named = f"{self._info.name}:{INTERPRETED.name}"
        return env.get("LEADFRAME_DEVICE", "") == named or interpreter.is_on(
            env.get(interpreter.SWITCH)
        )

    @hookimpl
    def platform_options(self) -> Sequence[OptionSpec]:
        """Lists the options."""
        return (
            OptionSpec("graphs", _switch, True, "record each bucket's step as a graph"),
            OptionSpec(
                "compile", str, "eager", "step: torch.compile for each bucket", ("eager", "step")
            ),
            OptionSpec(
                "batch_invariant",
                _switch,
                False,
                "a sequence's bits do not depend on the others in its batch; slower",
            ),
            OptionSpec(
                "tune", _switch, False, "measure attention tiles once per machine and keep them"
            ),
        )

    @hookimpl
    def platform_create(
        self, device: Device, options: Mapping[str, Any], limits: Limits
    ) -> Backend:
        """Builds the backend; torch and Triton are imported here and nowhere else."""
        if device.arch == INTERPRETER.name:
            interpreter.enable()
        else:
            interpreter.refuse_on_device()
        from leadframe_triton.backend import Settings, device_backend, interpreter_backend

        settings = Settings(**options)
        if device.arch == INTERPRETER.name:
            return interpreter_backend(settings, limits)
        self._check_visible(device, limits.tensor_parallel_size)
        return device_backend(device.index, settings, limits)

    def _check_visible(self, device: Device, ranks: int) -> None:
        """The driver's devices need not all be torch's, for a reason that only torch knows."""
        import torch

        count = torch.cuda.device_count()
        first = f"{self._info.name}:{device.index}"
        if not torch.cuda.is_available() or device.index >= count:
            raise DeviceNotFound(
                f"{first} ({device.name}) is present, but torch {torch.__version__} cannot use it: "
                f"it sees {count} devices; check the driver's version, or {self._build.remedy}"
            )
        if device.index + ranks > count:
            raise DeviceNotFound(
                f"--tensor-parallel-size is {ranks}; from {first} on there are "
                f"{count - device.index} of {count} devices; lower it or choose another device"
            )


def _switch(text: str) -> bool:
    value = text.lower()
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise ValueError("it must be on or off")


def visible(devices: Sequence[Device], mask: str | None, ids: Sequence[str]) -> tuple[Device, ...]:
    """Applies a `*_VISIBLE_DEVICES` mask as the vendors do, and numbers what is left.

    Args:
      devices: every device, in the order in which indices count.
      mask: comma-separated indices or unique ids; None shows everything; an entry that names no
        device hides it and all that follow.
      ids: the unique id of each device.
    """
    if mask is None:
        return tuple(devices)
    chosen: list[Device] = []
    for entry in (part.strip() for part in mask.split(",")):
        place = _place(entry, ids)
        if place is None:
            break
        found = devices[place]
        chosen.append(Device(len(chosen), found.name, found.memory_bytes, found.arch))
    return tuple(chosen)


def _place(entry: str, ids: Sequence[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(ids) else None
    matches = [place for place, name in enumerate(ids) if entry and name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def environment_mask(env: Mapping[str, str], *names: str) -> str | None:
    """The first of several masks that is set."""
    return next((env[name] for name in names if name in env), None)


__all__ = ["INTERPRETED", "Found", "GpuPlugin", "TorchBuild", "environment_mask", "visible"]
