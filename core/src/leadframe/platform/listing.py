"""What is installed and in which state: the rows of `leadframe devices`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from leadframe.errors import IncompatibleContract, LeadframeError
from leadframe.platform.discovery import (
    EntryPoint,
    duplicate_message,
    installed_entry_points,
    load_plugin,
)
from leadframe.platform.info import Detection, Device, PlatformInfo, contract_text
from leadframe.platform.plugin import Plugin

State = Literal["ready", "no device", "broken", "incompatible"]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One installed platform.

    Attributes:
      name: the `--device` value.
      distribution: who provides it.
      version: the distribution's version.
      contract: the contract that it was written for, such as "1.0"; empty when unknown.
      state: whether it can be used.
      reason: one line for people.
      devices: what was found.
      kind: "accelerator", "host" or "test"; empty when unknown.
      error: what is wrong, for states "broken" and "incompatible".
      plugin: the loaded plugin, when it loaded.
    """

    name: str
    distribution: str
    version: str
    contract: str
    state: State
    reason: str
    devices: tuple[Device, ...] = ()
    kind: str = ""
    error: LeadframeError | None = None
    plugin: Plugin | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns stable keys and plain values."""
        names = ("name", "distribution", "version", "contract", "kind", "state", "reason")
        row = {name: getattr(self, name) for name in names}
        return {**row, "devices": [asdict(device) for device in self.devices]}


def list_devices(
    env: Mapping[str, str], points: Sequence[EntryPoint] | None = None
) -> list[DeviceRow]:
    """Looks at every installed platform; never raises for a broken one.

    Args:
      env: the process environment.
      points: the entry points; None takes the installed ones.
    """
    points = installed_entry_points() if points is None else points
    counts = Counter(point.name for point in points)
    return [
        _duplicate_row(point, points) if counts[point.name] > 1 else inspect_plugin(point, env)
        for point in points
    ]


def inspect_plugin(point: EntryPoint, env: Mapping[str, str]) -> DeviceRow:
    """Loads one plugin and asks it for its devices."""
    plugin: Plugin | None = None
    info: PlatformInfo | None = None
    try:
        plugin = load_plugin(point)
        info = plugin.info()
        found = plugin.detect(env)
    except LeadframeError as error:
        state: State = "incompatible" if isinstance(error, IncompatibleContract) else "broken"
        return _row(point, info, state, one_line(error), error=error, plugin=plugin)
    return _found_row(point, info, found, plugin)


def _found_row(
    point: EntryPoint, info: PlatformInfo, found: Detection, plugin: Plugin
) -> DeviceRow:
    state: State = "ready" if found.devices else "no device"
    return _row(point, info, state, found.reason, devices=found.devices, plugin=plugin)


def _duplicate_row(point: EntryPoint, points: Sequence[EntryPoint]) -> DeviceRow:
    same = [other for other in points if other.name == point.name]
    return _row(point, None, "broken", duplicate_message(same))


def _row(
    point: EntryPoint, info: PlatformInfo | None, state: State, reason: str, **more: Any
) -> DeviceRow:
    return DeviceRow(
        name=point.name,
        distribution=point.distribution,
        version=point.version,
        contract=contract_text(info.contract) if info else "",
        kind=info.kind if info else "",
        state=state,
        reason=reason,
        **more,
    )


def one_line(error: BaseException) -> str:
    """Returns an error's message as one line."""
    problems = getattr(error, "problems", None)
    return " ".join((str(error) if problems is None else "; ".join(problems)).split())


def format_devices(rows: Sequence[DeviceRow]) -> str:
    """Returns a table for people."""
    if not rows:
        return "no platform is installed"
    header = ("NAME", "STATE", "DEVICES", "DISTRIBUTION", "CONTRACT", "REASON")
    cells = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header) - 1)]
    return "\n".join(_line(line, widths) for line in cells)


def _cells(row: DeviceRow) -> tuple[str, ...]:
    devices = ", ".join(f"{d.index} ({d.name})" for d in row.devices) or "-"
    who = f"{row.distribution} {row.version}"
    return (row.name, row.state, devices, who, row.contract or "-", row.reason)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    def padded() -> Iterator[str]:
        for cell, width in zip(cells, widths, strict=False):
            yield f"{cell:<{width}}"

    return "  ".join([*padded(), cells[-1]]).rstrip()


__all__ = ["DeviceRow", "State", "format_devices", "inspect_plugin", "list_devices", "one_line"]
