"""Types of the numbers that benchmarks take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Reads a number of rounds, requests, steps or tokens: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not a whole number of at least 1")
    return number
