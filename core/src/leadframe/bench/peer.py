"""Talks to a peer engine in a process of its own, one JSON line a request.

The peer runs only between a line in and a line out, so that it does not disturb what is measured
here. It is a program that is started with the path of the model and a number of threads, says
{"name"} when it has loaded, and answers each {"prompts", "max_tokens"}, prompts being lists of
token ids, with {"seconds", "token_ids"}: exactly `max_tokens` greedy tokens for each prompt.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
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
      ConfigError: the peer did not start, or speaks another protocol.
    """

    def __init__(self, command: Sequence[str], model: str, threads: int) -> None:
        try:
            self._process = subprocess.Popen(
                [*command, model, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                env=os.environ | {"TQDM_DISABLE": "1"},
            )
        except OSError as error:
            raise ConfigError(
                f"--compare: {command[0]!r} cannot be run ({error.strerror}); it takes "
                "transformers, none, or the command of a peer program"
            ) from None
        self.pid = self._process.pid
        self.name = str(self._read("name"))

    def run(self, workload: Workload) -> list[list[int]]:
        """Runs a workload and returns the tokens of each request.

        Raises:
          ConfigError: the peer ended, or did not answer with as many tokens as it was asked for.
        """
        request = {"prompts": workload.prompts, "max_tokens": workload.max_tokens}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a peer that has gone is told from its end of output
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return _checked(self._read("token_ids"), workload)

    def close(self) -> None:
        """Ends the peer's process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it may hold a request that nobody has read
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

    def _read(self, key: str) -> Any:
        """Returns one value of the next reply; a peer without one is ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ConfigError(
                f"the peer process ended with status {self._process.returncode}; its error is "
                "printed above; run without --compare to measure Leadframe alone"
            )
        with suppress(ValueError, TypeError, KeyError):
            return json.loads(line)[key]
        self.close()
        raise ConfigError(
            f"the peer process printed {line.strip()[:64]!r}; it must be a JSON object with "
            f"{key!r}, on a line of its own, and nothing else may go to its standard output"
        )


def split_command(text: str) -> list[str]:
    """Splits the command of a peer as a shell does.

    Raises:
      ConfigError: it is empty, or a quotation does not end.
    """
    try:
        command = shlex.split(text)
    except ValueError as error:
        reason = str(error).lower()
        raise ConfigError(f"--compare is {text!r}, which is no command: {reason}") from None
    if not command:
        raise ConfigError("--compare is empty; it takes transformers, none, or a command")
    return command


def _checked(tokens: Any, workload: Workload) -> list[list[int]]:
    """Returns a peer's tokens if they are as many as were asked for: its rate counts on that."""
    try:
        lengths = [len(row) for row in tokens]
    except TypeError:
        raise ConfigError("the peer's token_ids are not a list of lists; see bench.peer") from None
    num_prompts, count = len(workload.prompts), workload.max_tokens
    if lengths != [count] * num_prompts:
        raise ConfigError(
            f"the peer answered {num_prompts} prompts with {sum(lengths)} tokens in {len(lengths)} "
            f"rows; it must generate exactly {count} for each, past any end of sequence"
        )
    return list(tokens)


def median(values: Sequence[float]) -> float:
    """Returns the middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
