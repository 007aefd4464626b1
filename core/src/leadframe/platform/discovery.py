"""Finds plugins among the installed distributions and loads them one by one.

Every entry point is loaded in its own try and gets a plugin manager of its own: one that is
broken cannot hide another, and each error names its distribution.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from leadframe.errors import AmbiguousDevice, ContractViolation, PluginLoadError
from leadframe.platform import hookspecs
from leadframe.platform.hookspecs import OPTIONAL_HOOKS, REQUIRED_HOOKS
from leadframe.platform.names import did_you_mean
from leadframe.platform.plugin import Plugin
from leadframe.platform.version import ENTRY_POINT_GROUP

RESERVED_NAMES = frozenset({"auto"})
"""`--device` values with a meaning of their own."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One entry point of an installed distribution, not loaded yet.

    Attributes:
      name: the `--device` value.
      distribution: the distribution's name as pip knows it.
      version: its version.
      load: imports the plugin object.
    """

    name: str
    distribution: str
    version: str
    load: Callable[[], Any]

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"


def installed_entry_points(group: str = ENTRY_POINT_GROUP) -> list[EntryPoint]:
    """Lists the entry points of a group, sorted by name; imports nothing."""
    found = []
    for point in importlib.metadata.entry_points(group=group):
        name = point.dist.name if point.dist else "an unknown distribution"
        version = point.dist.version if point.dist else ""
        found.append(EntryPoint(point.name, name, version, point.load))
    return sorted(found, key=lambda point: (point.name, point.distribution))


def find_entry_point(name: str, points: Iterable[EntryPoint]) -> EntryPoint | None:
    """Returns the one entry point of a name, or None.

    Raises:
      AmbiguousDevice: two distributions claim the name.
    """
    matches = [point for point in points if point.name == name]
    if len(matches) > 1:
        raise AmbiguousDevice(duplicate_message(matches))
    return matches[0] if matches else None


def duplicate_message(points: Sequence[EntryPoint]) -> str:
    """Says which distributions claim one name, and what to do."""
    who = " and ".join(f"{point.distribution} {point.version}" for point in points)
    return (
        f"platform {points[0].name!r} is claimed by {who}; a name belongs to one distribution: "
        f"pip uninstall the one you do not want"
    )


def load_plugin(point: EntryPoint, required: Sequence[str] = REQUIRED_HOOKS) -> Plugin:
    """Imports and checks one plugin.

    Args:
      point: what to load.
      required: hooks that it must have.

    Raises:
      PluginLoadError: it could not be imported; the cause is chained.
      ContractViolation: a hook is missing, misspelt, or has the wrong signature, or the name is
        reserved.
    """
    if point.name in RESERVED_NAMES:
        raise ContractViolation(
            str(point), [f"the name {point.name!r} is reserved; choose another"]
        )
    try:
        module = point.load()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{point} could not be imported: {type(error).__name__}: {error}; mend or uninstall "
            f"it: pip uninstall {point.distribution}"
        ) from error
    manager = pluggy.PluginManager(ENTRY_POINT_GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, point.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ContractViolation(str(point), [message]) from error
    problems = [*_misspelt(manager), *_missing(manager, module, required)]
    if problems:
        raise ContractViolation(str(point), problems)
    return Plugin(point.name, point.distribution, point.version, manager)


def _misspelt(manager: pluggy.PluginManager) -> list[str]:
    """Hooks that the contract does not have and that are not marked optional."""
    try:
        manager.check_pending()
    except pluggy.PluginValidationError:
        known = (*REQUIRED_HOOKS, *OPTIONAL_HOOKS)
        callers = [caller for name, caller in vars(manager.hook).items() if name[0] != "_"]
        unknown = [caller.name for caller in callers if not caller.has_spec()]
        return [f"there is no hook {name!r}{did_you_mean(name, known)}" for name in unknown]
    return []


def _missing(manager: pluggy.PluginManager, module: Any, required: Sequence[str]) -> list[str]:
    problems = []
    for name in required:
        if not getattr(manager.hook, name).get_hookimpls():
            is_unmarked = hasattr(module, name)
            hint = "; it is defined but not marked with @hookimpl" if is_unmarked else ""
            problems.append(f"the required hook {name!r} is missing{hint}")
    return problems


__all__ = [
    "RESERVED_NAMES",
    "EntryPoint",
    "duplicate_message",
    "find_entry_point",
    "installed_entry_points",
    "load_plugin",
]
