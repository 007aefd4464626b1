"""Runs the server: binds early, watches the engine, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from leadframe.errors import ConfigError, EngineDead
from leadframe.server.app import create_app
from leadframe.server.replies import error_body
from leadframe.server.services import Services
from leadframe.server.settings import ServerConfig

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 64 << 10
_MAX_FILES: Final = 1 << 16
_TICK_SECONDS = 0.5
_HEADER_SECONDS = 15.0
"""How long a client may take to send the headers of a request."""
_DISCARD_SECONDS = 60.0
"""How long it may go on with a body that was refused."""
_KEEP_ALIVE_SECONDS = 65
"""Longer than clients keep idle connections, so that the client closes first and none is lost."""
_CLOSE_SECONDS = 5.0
"""How long connections have to take their last bytes once nothing generates any more."""


def bind(config: ServerConfig) -> socket.socket:
    """Takes the port before the model is loaded, so that a conflict shows at once.

    Raises:
      ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise _bind_error(config, error) from None
    return sock


def _bind_error(config: ServerConfig, error: OSError) -> ConfigError:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where} is in use by another process; choose another --port, or 0 for any"
        )
    return ConfigError(f"cannot bind {where}: {error.strerror or error}")


class _Protocol(H11Protocol):
    """HTTP/1.1 that waits for a slow client only so long, and refuses in OpenAI's shape.

    uvicorn's own access log is off: it writes query strings. Its own timer covers the time between
    two requests, but not a request whose headers never end, nor a body that nobody reads.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a new connection."""
        super().connection_made(transport)
        self.access_log = False
        self._patience = self.loop.call_later(_HEADER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        super().connection_lost(exc)
        self._stop_patience()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; once a request is complete, its handler decides how long to wait."""
        super().data_received(data)
        if self._is_serving():
            self._stop_patience()
        elif self._patience is None:
            is_header = self.conn.their_state is h11.IDLE
            seconds = _HEADER_SECONDS if is_header else _DISCARD_SECONDS
            self._patience = self.loop.call_later(seconds, self._give_up)

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        if not self._is_serving():
            self.transport.close()

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not HTTP, or whose headers are too large."""
        body = json.dumps(error_body(400, msg)).encode("ascii")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(item) or b"" for item in events))
        self.transport.close()


class Server(uvicorn.Server):
    """A server that drains when it is told to stop, and stops when its engine is dead.

    Args:
      services: what the routes use.
      on_started: called once the server answers.
    """

    def __init__(self, services: Services, on_started: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(services),
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(_CLOSE_SECONDS),
            )
        )
        self.exit_code = 0
        self._services, self._on_started = services, on_started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer.

        Raises:
          ConfigError: another process began to listen on the port in the meantime.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _bind_error(self._services.config, error) from None
        self._loop = asyncio.get_running_loop()
        self._spawn(self._watch())
        if self._on_started is not None:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections, then the engine."""
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        await self._services.engine.shutdown(0.0)
        self._services.prompts.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains at the first signal and leaves at once at the second."""
        if self._services.draining or self._loop is None:
            self.exit_code = 128 + sig
            self.should_exit = self.force_exit = True
            return
        self._services.draining = True
        name = signal.Signals(sig).name
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain(name)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, why: str) -> None:
        """Lets running requests finish for a while, then aborts them, then stops."""
        services = self._services
        limit = services.config.shutdown_timeout
        logger.info("%s: draining %d requests for up to %g s", why, len(services.live), limit)
        deadline = time.monotonic() + limit
        while services.live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if services.live:
            logger.warning("aborting %d requests that did not finish", len(services.live))
            await services.engine.shutdown(0.0)
        self.should_exit = True

    async def _watch(self) -> None:
        """Measures how late the loop is, and ends the process when the engine has died."""
        stalled = False
        while True:
            due = time.monotonic() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self._services.engine.metrics.on_loop_lag(max(0.0, time.monotonic() - due))
            health = self._services.engine.health()
            if not health.alive and not stalled:
                logger.critical(
                    "not alive: %s (%d running, %d waiting)",
                    health.reason,
                    health.running,
                    health.waiting,
                )
            stalled = not health.alive
            if stalled and not health.ready and not self._services.draining:
                self.exit_code = EngineDead.exit_code
                self._services.draining = self.should_exit = True


def run(
    services: Services, sock: socket.socket, on_started: Callable[[], None] | None = None
) -> int:
    """Serves until told to stop.

    Returns:
      The exit status of the process.
    """
    _allow_connections()
    server = Server(services, on_started)
    # What start-up made stays for good: a full collection need not look at it, and stop the event
    # loop and the engine for that long, again and again.
    gc.collect()
    gc.freeze()
    server.run(sockets=[sock])
    return server.exit_code


def _allow_connections() -> None:
    """Raises the soft limit of open files, often 1,024: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
