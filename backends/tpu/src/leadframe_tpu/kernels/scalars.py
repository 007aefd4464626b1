"""Integer arithmetic on the scalar core. No operand is negative, so rounding down is truncation.

Python's `//` and `%` also settle signs, which doubles the instructions of the loops that start
copies.
"""

from __future__ import annotations

from typing import Any

from jax import lax


def div(a: Any, b: int) -> Any:
    """A / b, rounded down."""
    return lax.div(a, b)


def rem(a: Any, b: int) -> Any:
    """A modulo b."""
    return lax.rem(a, b)


def ceil_div(a: Any, b: int) -> Any:
    """A / b, rounded up."""
    return lax.div(a + (b - 1), b)
