"""`leadframe new-backend NAME`: hands over to the generator, which the kit ships."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Writes the skeleton of a plugin."""
    from leadframe.conformance.new_backend import main

    status: int = main(list(argv))
    return status
