"""`leadframe bench startup`: from the command to a server that answers, phase by phase.

Each round is a fresh process. The first may fill caches that later ones find.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from leadframe.bench.arguments import count
from leadframe.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument(
        "--rounds", type=count, default=2, help="servers to start, one after another"
    )
    parser.add_argument(
        "serve_args", nargs="*", metavar="-- SERVE-ARGUMENT",
        help="arguments of leadframe serve, after --",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Starts servers and prints where the time went."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}; it must be at least 1")
    rounds = [start_once(args.serve_args) for _ in range(args.rounds)]
    print(json.dumps({"rounds": rounds}, indent=2) if args.json else _table(rounds))
    return 0


def start_once(serve_args: list[str]) -> dict[str, Any]:
    """Starts one server, waits until it answers, and stops it.

    Returns:
      "wall_seconds" from the command to the first answer, the ledger's "phases" and
      "total_seconds", and "other_seconds", which no phase accounts for.

    Raises:
      ConfigError: it did not start; its own message is printed before.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "startup.json"
        command = [sys.executable, "-m", "leadframe.cli.main", "serve", "--port", "0"]
        command += ["--startup-json", str(path), "--log-level", "warning", *serve_args]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            wall = _wait_ready(process, start)
            report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    other = wall - report["total_seconds"]
    return {"wall_seconds": wall, "other_seconds": other, **report}


def _wait_ready(process: subprocess.Popen[str], start: float) -> float:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            return time.perf_counter() - start
    raise ConfigError(f"leadframe serve ended with status {process.wait()} before it answered")


def _table(rounds: list[dict[str, Any]]) -> str:
    names = [phase["name"] for phase in rounds[0]["phases"]]
    lines = [
        f"{'seconds':<10}" + "".join(f"{'round ' + str(i + 1):>10}" for i in range(len(rounds)))
    ]
    for index, name in enumerate(names):
        cells = (f"{r['phases'][index]['seconds']:>10.2f}" for r in rounds)
        lines.append(f"{name:<10}" + "".join(cells))
    for name, key in (("other", "other_seconds"), ("wall", "wall_seconds")):
        lines.append(f"{name:<10}" + "".join(f"{r[key]:>10.2f}" for r in rounds))
    return "\n".join(lines)
