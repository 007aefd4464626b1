"""The API key: every route needs it but an explicit list, matched on the endpoint that will run."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from leadframe.server.replies import HttpError, error_reply

Endpoint = Callable[..., Any]


class KeyGuard:
    """ASGI middleware that answers 401 unless a key is sent or the endpoint is open.

    It asks the routes which endpoint will run, exactly as the router does, so that no spelling
    of a path can differ between the check and the dispatch. What no route serves is guarded too.

    Args:
      app: the application behind it.
      routes: the routes of that application, in order.
      keys: accepted keys; none leaves every route open.
      open_endpoints: endpoints that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        keys: Sequence[str],
        open_endpoints: Collection[Endpoint],
    ) -> None:
        self._app, self._routes = app, routes
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = open_endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it before its body is read."""
        if scope["type"] == "http" and self._digests and not self._admits(scope):
            refusal = HttpError(
                401,
                "a valid API key is required; send it as 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
            await error_reply(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        return self._routed_endpoint(scope) in self._open or self._has_key(scope)

    def _routed_endpoint(self, scope: Scope) -> Endpoint | None:
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "endpoint", None)
        return None

    def _has_key(self, scope: Scope) -> bool:
        """Compares digests with every key, whichever matches, in constant time."""
        values = Headers(scope=scope).getlist("authorization")
        if len(values) != 1:
            return False
        scheme, _, token = values[0].partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return False
        sent = _digest(token.strip().encode("latin-1"))
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
