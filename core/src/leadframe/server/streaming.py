"""Server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leadframe.server.replies import describe

T = TypeVar("T")

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": still here\n\n"
_KEEP_ALIVE_SECONDS = 15.0
_STALL_SECONDS = 120.0
"""A client that takes nothing for this long is dropped."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads the reply."""


def event(data: dict[str, object]) -> bytes:
    """Encodes one event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it when the client closes the connection.

    Raises:
      ClientGone: the client closed first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def for_request(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work` for a request whose body has been read, unless its client goes away."""
    return await unless_gone(request.receive, work)


class EventStream(Response):
    """Sends events as they come. However it ends, `on_close` runs once.

    An error after the first byte becomes an event of its own; `[DONE]` is always last.

    Args:
      events: encoded events.
      on_close: frees what makes the events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_close = events, on_close
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the events end or the client goes away."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, TimeoutError):
            pass
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        heartbeat = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(_with_end(self._events)) as events:
                async for chunk in events:
                    async with asyncio.timeout(_STALL_SECONDS):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._last_sent = time.monotonic()
        finally:
            heartbeat.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Sends a comment when nothing else was sent for a while: proxies close silent streams."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_SECONDS)
            if time.monotonic() - self._last_sent >= _KEEP_ALIVE_SECONDS:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def _with_end(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for chunk in events:
                yield chunk
    except Exception as error:
        _, body, _ = describe(error)
        yield event(body)
    yield DONE
