"""The outermost layer: an id and a log line for each request; bodies and queries stay out of it."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadframe.server.replies import bounded

logger = logging.getLogger("leadframe.server")

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_QUIET_PATHS = frozenset({"/health", "/health/ready", "/metrics"})


class RequestLog:
    """ASGI middleware that sets `X-Request-Id` and logs method, path, status and duration.

    A client's own id is used when it is short and harmless; the engine's ids never depend on it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _SAFE_ID.match(sent) else uuid.uuid4().hex
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
            path = bounded(scope["path"].replace("\n", "\\n"), 128)
            seconds = time.monotonic() - started
            logger.log(
                level, "%s %s %d %.3fs %s", scope["method"], path, status, seconds, request_id
            )
