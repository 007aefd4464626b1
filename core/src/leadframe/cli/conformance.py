"""`leadframe conformance …`: hands over to the kit."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Runs the conformance kit with these arguments."""
    from leadframe.conformance import main

    status: int = main(list(argv))
    return status
