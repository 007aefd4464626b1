"""`leadframe compile-check PLATFORM`: the command line of a compile check.

The compiling happens in worker processes, because Triton decides once per process whether it
interprets or compiles, and because several of them are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, TextIO

from leadframe.errors import CompileError, ConfigError
from leadframe_triton.arch import ARCHS, CHECKED, Vendor
from leadframe_triton.compile_check.worker import Share

Row = dict[str, Any]

_COLUMNS: Final = (
    ("target", "target", 8),
    ("kernel", "kernel", 17),
    ("config", "config", 52),
    ("registers", "regs", 5),
    ("spills", "spills", 7),
    ("shared_bytes", "shared", 8),
    ("tensor_cores", "tensor_cores", 0),
)


def main(vendor: Vendor, platform: str, argv: Sequence[str]) -> int:
    """Checks the kernels for one vendor's chips.

    Returns:
      0 when nothing is wrong, 1 otherwise.

    Raises:
      ConfigError: nothing matches.
    """
    args = _parser(vendor, platform).parse_args(argv)
    share = Share(tuple(args.target or CHECKED[vendor]), args.matrix, args.match)
    rows = []
    for row in compile_rows(share, args.jobs):
        rows.append(row)
        if not args.json:
            _print_row(sys.stdout, row, is_first=len(rows) == 1)
    if not rows:
        raise ConfigError(
            f"--match {args.match!r}: no kernel or configuration of {', '.join(share.targets)} in "
            f"the matrix {args.matrix!r} contains it; leave it out to see them all"
        )
    bad = sum(bool(row["problems"]) for row in rows)
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write(f"{len(rows)} kernels compiled, {bad} with problems\n")
    return 1 if bad else 0


def _parser(vendor: Vendor, platform: str) -> argparse.ArgumentParser:
    targets = [arch.name for arch in ARCHS.values() if arch.vendor == vendor]
    parser = argparse.ArgumentParser(
        prog=f"leadframe compile-check {platform}",
        description="Compile every kernel through the real wrappers for chips that are not here; "
        "fail on spilled registers, too much shared memory, lost matrix instructions, and kernels "
        "that are compiled again when lengths change.",
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=targets,
        metavar="ARCH",
        help=f"repeatable; default: {' '.join(CHECKED[vendor])}; known: {' '.join(targets)}",
    )
    parser.add_argument("--matrix", choices=("standard", "full"), default="full")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases that contain it")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="worker processes")
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def compile_rows(share: Share, jobs: int) -> Iterator[Row]:
    """Yields the rows of a share, compiled by `jobs` processes, as they come.

    Raises:
      CompileError: a worker ended with an error of its own.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker(replace(share, index=index, count=jobs), lines))
            for index in range(jobs)
        ]
        for _ in workers:
            while (line := lines.get()) is not None:
                yield json.loads(line)
        for worker in workers:
            if failure := worker.failure():
                raise CompileError(f"targets {', '.join(share.targets)}", failure)


class _Worker:
    """A worker process whose lines go to a queue; None follows the last one."""

    def __init__(self, share: Share, lines: queue.Queue[str | None]) -> None:
        command = [sys.executable, "-m", "leadframe_triton.compile_check.worker", share.as_json()]
        environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._forward, args=(lines,), daemon=True)
        self._reader.start()

    def _forward(self, lines: queue.Queue[str | None]) -> None:
        for line in self._process.stdout or ():
            lines.put(line)
        lines.put(None)

    def failure(self) -> str:
        """Waits for the end; the last lines of what went wrong, or nothing."""
        if not self._process.wait():
            return ""
        self._errors.seek(0)
        return self._errors.read()[-2000:].strip() or f"exit status {self._process.returncode}"

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()


def _print_row(out: TextIO, row: Row, *, is_first: bool) -> None:
    if is_first:
        out.write(" ".join(title.ljust(width) for _, title, width in _COLUMNS) + "\n")
    cells = [str(row[key]).ljust(width) for key, _, width in _COLUMNS]
    out.write(" ".join(cells).rstrip() + "\n")
    for problem in row["problems"]:
        out.write(f"  PROBLEM {problem}\n")
    if row["note"]:
        out.write(f"  accepted: {row['note']}\n")
    out.flush()
