"""Distributions that this project publishes, for the hint when one is not installed. Text only."""

from __future__ import annotations

from typing import Final

FIRST_PARTY: Final = {name: f"leadframe-{name}" for name in ("cpu", "cuda", "rocm", "tpu", "xpu")}
"""`--device` value → distribution."""


def install_hint(name: str) -> str:
    """Returns how to get a platform, or nothing for one that we do not publish."""
    distribution = FIRST_PARTY.get(name)
    return f"; install it with: pip install {distribution}" if distribution else ""


__all__ = ["FIRST_PARTY", "install_hint"]
