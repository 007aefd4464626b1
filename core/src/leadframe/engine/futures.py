"""Settling a future of an event loop from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def run_into(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], fn: Callable[[], Any]
) -> None:
    """Runs a function in this thread and settles a future of the event loop with it.

    An error refers to the frames that it passed; one of them that kept the future would make a
    cycle, and a thousand refused requests a long pause of the garbage collector.
    """
    try:
        result = fn()
    except Exception as error:
        _tell(loop, future, None, error)
    else:
        _tell(loop, future, result, None)
    finally:
        del future


def _tell(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    result: Any,
    error: BaseException | None,
) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
