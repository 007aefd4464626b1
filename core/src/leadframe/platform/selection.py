"""Chooses the device and creates its backend. There is no process-global current platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from leadframe.errors import (
    AmbiguousDevice,
    ConfigError,
    DeviceNotFound,
    PlatformError,
    PlatformNotInstalled,
    PluginLoadError,
)
from leadframe.platform.backend import Backend
from leadframe.platform.discovery import (
    EntryPoint,
    find_entry_point,
    installed_entry_points,
    load_plugin,
)
from leadframe.platform.first_party import FIRST_PARTY, install_hint
from leadframe.platform.guard import guard
from leadframe.platform.info import Detection, Device, KernelImpl, Limits, OptionSpec
from leadframe.platform.listing import DeviceRow, format_devices, list_devices
from leadframe.platform.names import did_you_mean
from leadframe.platform.plugin import Plugin
from leadframe.platform.validate import validate_backend
from leadframe.platform.version import KERNEL_GROUP

_AUTO: Final = "auto"
_Source = Literal["--device", "LEADFRAME_DEVICE", "config", "auto"]


@dataclass(frozen=True, slots=True)
class Selection:
    """A device that was chosen.

    Attributes:
      plugin: the plugin that serves it.
      device: the device.
      source: who chose: "--device", "LEADFRAME_DEVICE", "config" or "auto".
      note: one line to show first.
    """

    plugin: Plugin
    device: Device
    source: _Source
    note: str

    @property
    def name(self) -> str:
        """NAME:INDEX."""
        return f"{self.plugin.name}:{self.device.index}"

    def kernels(self) -> tuple[KernelImpl, ...]:
        """Returns the kernels offered for this platform, by its own plugin and by others."""
        return (*self.plugin.kernels(self.plugin.name), *extra_kernels(self.plugin.name))


def select_device(
    requested: str | None,
    env: Mapping[str, str],
    config: str | None = None,
    *,
    points: Sequence[EntryPoint] | None = None,
) -> Selection:
    """Chooses a device: `requested`, else `LEADFRAME_DEVICE`, else `config`, else "auto".

    Args:
      requested: the `--device` value, NAME[:INDEX] or "auto"; a device's name may stand for its
        index; None when it was not given.
      env: the process environment.
      config: the value from a config file, if any.
      points: the entry points; None takes the installed ones.

    Raises:
      PlatformNotInstalled: no plugin has that name.
      DeviceNotFound: the plugin finds no such device.
      PluginLoadError, ContractViolation, IncompatibleContract: the plugin is broken.
      AmbiguousDevice: "auto" found several accelerators.
    """
    points = installed_entry_points() if points is None else points
    values: tuple[tuple[_Source, str | None], ...] = (
        ("--device", requested),
        ("LEADFRAME_DEVICE", env.get("LEADFRAME_DEVICE")),
        ("config", config),
    )
    for source, value in values:
        if value is not None and not value.strip():
            raise ConfigError(f"{source} is empty; name a platform, or auto")
        if value and value != _AUTO:
            return _explicit(value, source, env, points)
        if value == _AUTO:
            break
    return _automatic(env, points)


def create_backend(
    selection: Selection, options: Mapping[str, str] | None = None, limits: Limits | None = None
) -> Backend:
    """Creates, checks and guards the backend of a device.

    Args:
      selection: what `select_device` returned.
      options: `-o KEY=VALUE` as text.
      limits: what the engine will ask.

    Raises:
      ConfigError: an option is unknown or its value is bad.
      ContractViolation: the backend does not follow the contract.
      PlatformError: the device cannot be used.
    """
    plugin = selection.plugin
    values = parse_options(plugin, options or {})
    created = plugin.create(selection.device, values, limits or Limits())
    return guard(validate_backend(created, str(plugin), plugin.info().contract))


def parse_options(plugin: Plugin, given: Mapping[str, str]) -> dict[str, Any]:
    """Converts `-o KEY=VALUE` texts; returns every option of the platform with its value.

    Raises:
      ConfigError: names the option and what it takes.
    """
    specs = {spec.name: spec for spec in plugin.options()}
    for name in given:
        if name not in specs:
            known = ", ".join(specs) or "no options"
            hint = did_you_mean(name, specs) or f"; it takes {known}"
            raise ConfigError(f"platform {plugin.name!r} has no option {name!r}{hint}")
    return {
        name: _convert(spec, given[name]) if name in given else spec.default
        for name, spec in specs.items()
    }


def _convert(spec: OptionSpec, text: str) -> Any:
    try:
        value = spec.type(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"-o {spec.name}={text}: {error}") from error
    if spec.choices is not None and value not in spec.choices:
        allowed = ", ".join(str(choice) for choice in spec.choices)
        raise ConfigError(f"-o {spec.name}={text}: it must be one of {allowed}")
    return value


def extra_kernels(
    platform: str, points: Sequence[EntryPoint] | None = None
) -> tuple[KernelImpl, ...]:
    """Returns the kernels that other plugins offer for a platform.

    Raises:
      PlatformError: such a plugin is broken; it was installed to be used, so it is not skipped.
    """
    points = installed_entry_points(KERNEL_GROUP) if points is None else points
    found: list[KernelImpl] = []
    for point in points:
        if point.name == platform:
            plugin = load_plugin(point, required=("platform_info", "platform_kernels"))
            plugin.info(is_platform=False)
            found.extend(plugin.kernels(platform))
    return tuple(found)


def _explicit(
    value: str, source: _Source, env: Mapping[str, str], points: Sequence[EntryPoint]
) -> Selection:
    """The named device or an error: it never becomes another one, and imports only its plugin."""
    name, _, index = value.partition(":")
    point = find_entry_point(name, points)
    if point is None:
        raise PlatformNotInstalled(_not_installed(name, source, points))
    try:
        plugin = load_plugin(point)
    except PluginLoadError as error:
        raise PluginLoadError(f"{error}\n\n{_installed(points)}") from error.__cause__
    plugin.info()
    # A plugin may have devices that exist only when they are named, such as an interpreter.
    found = plugin.detect({**env, "LEADFRAME_DEVICE": value})
    if not found.devices:
        raise DeviceNotFound(
            f"device {value!r} ({source}) is not present: {plugin.distribution} "
            f"{plugin.version} is installed and finds no device: {found.reason}\n\n"
            f"{_installed(points)}"
        )
    device = _device(value, index, found)
    return Selection(plugin, device, source, f"device: {name}:{device.index} ({device.name})")


def _device(value: str, index: str, found: Detection) -> Device:
    if not index:
        return found.devices[0]
    for device in found.devices:
        if index == str(device.index) or index.lower() == device.name.lower():
            return device
    present = ", ".join(f"{device.index} ({device.name})" for device in found.devices)
    raise DeviceNotFound(f"device {value!r} is not present; there are: {present}")


def _not_installed(name: str, source: str, points: Sequence[EntryPoint]) -> str:
    names = {point.name for point in points}
    hint = install_hint(name) or did_you_mean(name, {*names, *FIRST_PARTY})
    failure = f"device {name!r} ({source}): no installed distribution provides it{hint}"
    return f"{failure}\n\n{_installed(points)}"


def _installed(points: Sequence[EntryPoint]) -> str:
    """A table of what is installed, without importing any of it."""
    if not points:
        return "no platform is installed"
    width = max(len(point.name) for point in points)
    lines = [f"  {p.name:<{width}}  {p.distribution} {p.version}" for p in points]
    return "\n".join(["installed platforms:", *lines])


def _automatic(env: Mapping[str, str], points: Sequence[EntryPoint]) -> Selection:
    rows = list_devices(env, points)
    ready = [row for row in rows if row.state == "ready"]
    accelerators = [row for row in ready if row.kind == "accelerator"]
    if len(accelerators) > 1:
        names = " or ".join(f"--device {row.name}" for row in accelerators)
        raise AmbiguousDevice(
            f"auto found {len(accelerators)} accelerators; choose one with {names}\n\n"
            f"{format_devices(rows)}"
        )
    if accelerators:
        return _chosen(accelerators[0], "")
    broken = [row for row in rows if row.state in ("broken", "incompatible")]
    if broken:
        raise _unknown_state(broken, rows)
    hosts = [row for row in ready if row.kind == "host"]
    if len(hosts) != 1:
        raise _no_host(hosts, rows)
    return _chosen(hosts[0], f": {_why_host(rows)}")


def _why_host(rows: Sequence[DeviceRow]) -> str:
    """Says why no accelerator was chosen, and no more than is known."""
    names = [row.name for row in rows if row.kind == "accelerator"]
    if not names:
        return "no accelerator plugin is installed"
    return f"no device of {', '.join(names)} is ready; `leadframe devices` says why"


def _chosen(row: DeviceRow, why: str) -> Selection:
    if row.plugin is None:
        raise DeviceNotFound(f"platform {row.name!r} is not loaded")
    device = row.devices[0]
    note = f"device: {row.name}:{device.index} ({device.name}; auto{why})"
    return Selection(row.plugin, device, _AUTO, note)


def _unknown_state(broken: Sequence[DeviceRow], rows: Sequence[DeviceRow]) -> PlatformError:
    """A plugin that cannot say whether its device is present must not mean "no accelerator"."""
    first = broken[0]
    message = (
        f"auto cannot tell whether an accelerator is present: plugin {first.name!r} of "
        f"{first.distribution} {first.version}: {first.reason}\n"
        f"mend or uninstall {first.distribution}, or name a device with --device NAME\n\n"
        f"{format_devices([_short(row) for row in rows])}"
    )
    failure = AmbiguousDevice(message)
    failure.__cause__ = first.error
    return failure


def _short(row: DeviceRow) -> DeviceRow:
    limit = 100
    reason = row.reason if len(row.reason) <= limit else row.reason[: limit - 1] + "…"
    return replace(row, reason=reason)


def _no_host(hosts: Sequence[DeviceRow], rows: Sequence[DeviceRow]) -> PlatformError:
    if hosts:
        names = " or ".join(f"--device {row.name}" for row in hosts)
        return AmbiguousDevice(f"auto found several host platforms; choose one with {names}")
    hint = install_hint("cpu")
    table = format_devices(rows)
    return PlatformNotInstalled(f"auto found no device that can serve{hint}\n\n{table}")


__all__ = [
    "Selection",
    "create_backend",
    "extra_kernels",
    "parse_options",
    "select_device",
]
