"""Imports a library that changes others, and puts the others back.

IPEX replaces functions and methods of torch and of Transformers while it is imported. Its paged
attention needs none of that, and other backends in the process shall not notice it. What it
registers below Python, in torch's dispatcher, stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Owner = ModuleType | type


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Makes the import of a package fail while the block runs, as if it were not installed."""
    missing = object()
    saved: Any = sys.modules.get(name, missing)
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for "not importable"
    try:
        yield
    finally:
        del sys.modules[name]
        if saved is not missing:
            sys.modules[name] = saved


@contextmanager
def unchanged(package: str) -> Iterator[None]:
    """Undoes what the block replaces among a package's public functions, and its methods."""
    before = [(owner, _watched(owner)) for owner in _owners(package)]
    try:
        yield
    finally:
        for owner, names in before:
            _restore(owner, names)


def _owners(package: str) -> list[Owner]:
    """The package's modules, and the classes that they define."""
    owners: list[Owner] = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == package:
            members = list(vars(module).values())
            owners.append(module)
            # not isinstance: it asks objects for their class, and some of torch's then warn
            classes = [m for m in members if issubclass(type(m), type)]
            owners += [c for c in classes if vars(c).get("__module__") == name]
    return owners


def _watched(owner: Owner) -> dict[str, Any]:
    """A class's own names; a module's public ones, the others are its own affair."""
    names = list(vars(owner).items())
    if isinstance(owner, type):
        return dict(names)
    return {name: value for name, value in names if not name.startswith("_")}


def _restore(owner: Owner, names: dict[str, Any]) -> None:
    now = _watched(owner)
    for name, value in names.items():
        if callable(value) and now.get(name) is not value:
            setattr(owner, name, value)
    if isinstance(owner, type):
        inherited = {name for base in owner.__mro__[1:] for name in vars(base)}
        for name in (now.keys() - names.keys()) & inherited:
            delattr(owner, name)
