"""Distributions of this project, for the hint when one is not installed. Text only."""

from __future__ import annotations

from typing import Final

FIRST_PARTY: Final = {name: f"leadframe-{name}" for name in ("cpu", "cuda", "rocm", "tpu", "xpu")}
"""`--device` value → distribution."""

_FOLDERS: Final = {
    "cpu": ("torch", "cpu"),
    "cuda": ("torch", "triton", "cuda"),
    "rocm": ("torch", "triton", "rocm"),
    "tpu": ("tpu[tpu]",),
    "xpu": ("torch", "triton", "xpu"),
}
"""`--device` value → folders of `backends/`, those first that others of them need."""


def install_hint(name: str) -> str:
    """Returns how to get a platform, or nothing for one that is not ours.

    It names folders and not distributions: none is published, so that on an index anybody else
    could have taken the name.
    """
    folders = _FOLDERS.get(name)
    if folders is None:
        return ""
    return f"; from a checkout of Leadframe: pip install {' '.join(map(_path, folders))}"


def _path(folder: str) -> str:
    path = f"./backends/{folder}"
    return f"'{path}'" if "[" in path else path


__all__ = ["FIRST_PARTY", "install_hint"]
