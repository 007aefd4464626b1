"""Names that people type: close matches for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_CUTOFF: Final = 0.7
"""difflib's own 0.6 takes "gpu" for "xpu": a wrong guess misleads more than none."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    return f"; did you mean {close[0]!r}?" if close else ""


__all__ = ["did_you_mean"]
