"""Runs a plugin's code with a limit on how long the caller waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from leadframe.errors import ConfigError

_Result = TypeVar("_Result")
_VARIABLE = "LEADFRAME_DETECT_TIMEOUT"
_DEFAULT_SECONDS = 2.0


def detect_timeout(env: Mapping[str, str]) -> float:
    """Returns how many seconds detection may take.

    Raises:
      ConfigError: the variable is not a positive number.
    """
    text = env.get(_VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e6:
        raise ConfigError(f"{_VARIABLE} is {text!r}; it must be a positive number of seconds")
    return seconds


def run_with_timeout(function: Callable[[], _Result], seconds: float) -> _Result | None:
    """Runs a function in a thread; returns None when it does not finish in time.

    The thread is a daemon: one that hangs does not keep the process alive.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="leadframe-detect", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None


__all__ = ["detect_timeout", "run_with_timeout"]
