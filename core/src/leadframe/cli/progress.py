"""Progress on the terminal, on stderr, and only where a person looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Report(Protocol):
    """Takes how far something has come."""

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total`."""


@contextmanager
def progress_bar(label: str, *, is_bytes: bool = False) -> Iterator[Report]:
    """Shows a bar that begins with its first report; nothing when stderr is not a terminal."""
    counts: list[ProgressColumn] = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        if is_bytes
        else [MofNCompleteColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None, visible=False)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield report
