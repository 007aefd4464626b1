"""Talks to a peer engine in a process of its own, one JSON line a request.

The peer runs only between a line in and a line out, so that it does not disturb what is measured
here. It is a program that is started with the path of the model and a number of threads, says
{"name"} when it has loaded, and answers each {"prompts", "max_tokens"}, prompts being lists of
token ids, with {"seconds", "token_ids"}: exactly `max_tokens` greedy tokens for each prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from leadframe.bench.workloads import Workload
from leadframe.errors import ConfigError

TRANSFORMERS = (sys.executable, "-m", "leadframe_torch.transformers_peer")
"""A module's name: the core imports no array library."""


class Peer:
    """A peer engine that has loaded a model.

    Args:
      command: the program and its first arguments.
      model: the path of the model, as the peer wants it.
      threads: threads that it may use.

    Raises:
      ConfigError: the peer did not start.
    """

    def __init__(self, command: Sequence[str], model: str, threads: int) -> None:
        try:
            self._process = subprocess.Popen(
                [*command, model, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TQDM_DISABLE": "1"},
            )
        except OSError as error:
            raise ConfigError(
                f"--compare: {command[0]!r} cannot be run ({error.strerror}); it takes "
                "transformers, none, or the command of a peer program"
            ) from None
        self.pid = self._process.pid
        self.name = str(self._read()["name"])

    def run(self, workload: Workload) -> dict[str, Any]:
        """Runs a workload and returns {"seconds", "token_ids"}."""
        request = {"prompts": workload.prompts, "max_tokens": workload.max_tokens}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the peer's process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ConfigError(
                f"the peer process ended with status {self._process.returncode}; its error is "
                "printed above; run without --compare to measure Leadframe alone"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


def median(values: Sequence[float]) -> float:
    """Returns the middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
