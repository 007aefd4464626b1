"""Loads the plugin under test from command-line arguments: in a fresh process, or again in this."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from typing import Any

from leadframe.errors import PlatformNotInstalled
from leadframe.platform import Backend, Limits
from leadframe.platform.discovery import EntryPoint, find_entry_point, installed_entry_points
from leadframe.platform.selection import Selection, create_backend, select_device


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the arguments; `Kit.probe_args` are some."""
    out = argparse.ArgumentParser()
    out.add_argument("--device", required=True)
    out.add_argument("--object", help="MODULE:ATTRIBUTE instead of an installed plugin")
    out.add_argument("--distribution", default="a stub")
    out.add_argument("-o", dest="option", action="append", default=[])
    return out


def entry_point(args: argparse.Namespace) -> EntryPoint:
    """Returns the plugin's entry point.

    Raises:
      PlatformNotInstalled: nothing installed has that name.
    """
    name = args.device.partition(":")[0]
    if not args.object:
        found = find_entry_point(name, installed_entry_points())
        if found is None:
            raise PlatformNotInstalled(f"no installed distribution provides {name!r}")
        return found
    module, _, attribute = args.object.partition(":")

    def load() -> Any:
        return getattr(importlib.import_module(module), attribute)

    return EntryPoint(name, args.distribution, "0", load)


def create(
    args: argparse.Namespace, point: EntryPoint, limits: Limits | None = None
) -> tuple[Selection, Backend]:
    """Selects the device and creates its backend.

    Raises:
      LeadframeError: the device cannot be used.
    """
    selection = select_device(args.device, os.environ, points=[point])
    options = dict(pair.split("=", 1) for pair in args.option)
    return selection, create_backend(selection, options, limits)


def open_again(probe_args: Sequence[str], limits: Limits) -> tuple[Selection, Backend]:
    """Creates a backend from `Kit.probe_args`.

    Raises:
      LeadframeError: the device cannot be used so.
    """
    args = parser().parse_args(probe_args)
    return create(args, entry_point(args), limits)


__all__ = ["create", "entry_point", "open_again", "parser"]
