"""`leadframe version`."""

from __future__ import annotations

from collections.abc import Sequence

from leadframe import __version__
from leadframe.cli.parser import Parser


def run(argv: Sequence[str]) -> int:
    """Prints the version."""
    Parser(prog="leadframe version", description="Print the version.").parse(argv)
    print(__version__)
    return 0
