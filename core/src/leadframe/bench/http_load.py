"""One streamed completion over HTTP, timed chunk by chunk. Works with any OpenAI-shaped server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

import h11

from leadframe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Attributes:
      host: its name or address.
      port: its port.
      path: what comes before `/v1`.
      api_key: sent as a bearer token; empty sends none.
    """

    host: str
    port: int
    path: str = ""
    api_key: str = ""

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> Target:
        """Reads a base URL such as http://127.0.0.1:8000.

        Raises:
          ConfigError: it is not an http URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError as error:
            raise ConfigError(f"--base-url is {url!r}: {error}") from None
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--base-url is {url!r}; it must look like http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, api_key)


@dataclass(slots=True)
class Timing:
    """What one request took; monotonic seconds.

    Attributes:
      start: when it was sent.
      chunks: (when it came, tokens in it) of every chunk with tokens.
      prompt_tokens: as the server counts them.
      output_tokens: as the server counts them.
      error: what went wrong; empty if nothing did.
    """

    start: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Start to first token."""
        return self.chunks[0][0] - self.start

    @property
    def e2e(self) -> float:
        """Start to last token."""
        return self.chunks[-1][0] - self.start

    @property
    def tpot(self) -> float | None:
        """(e2e - TTFT) / (output tokens - 1)."""
        gaps = sum(count for _, count in self.chunks) - 1
        return (self.e2e - self.ttft) / gaps if gaps > 0 else None

    def itl(self) -> list[float]:
        """Returns the gap before each token but the first; tokens of one chunk share theirs."""
        gaps = [0.0] * (self.chunks[0][1] - 1)
        for (before, _), (now, count) in pairwise(self.chunks):
            gaps += [(now - before) / count] * count
        return gaps


async def stream_completion(target: Target, body: dict[str, object]) -> Timing:
    """Sends one streamed completion and times its tokens; never raises for a bad answer."""
    timing = Timing(time.monotonic())
    full = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with _exchange(target, "POST", "/v1/completions", full) as lines:
            async for line in lines:
                _take(timing, line)
    except (OSError, h11.ProtocolError, ValueError, EOFError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    if not timing.error and not timing.chunks:
        timing.error = "no token came"
    return timing


async def get_json(target: Target, path: str) -> dict[str, object]:
    """Returns the JSON of a GET route.

    Raises:
      ConfigError: nobody answers there, or not with JSON.
    """
    where = f"http://{target.host}:{target.port}{target.path}{path}"
    try:
        async with _exchange(target, "GET", path, None) as lines:
            data = json.loads("".join([line async for line in lines]))
    except (OSError, h11.ProtocolError, ValueError, EOFError) as error:
        raise ConfigError(f"{where} does not answer as a server does: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} does not answer with an object")
    return data


def _take(timing: Timing, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    data = json.loads(line.removeprefix("data: "))
    if "error" in data:
        timing.error = str(data["error"])[:300]
        return
    usage = data.get("usage")
    if usage:
        timing.prompt_tokens = usage["prompt_tokens"]
        timing.output_tokens = usage["completion_tokens"]
    for choice in data.get("choices", ()):
        tokens = choice.get("token_ids")
        count = len(tokens) if tokens is not None else bool(choice.get("text"))
        if count:
            timing.chunks.append((time.monotonic(), count))


@asynccontextmanager
async def _exchange(
    target: Target, method: str, path: str, body: dict[str, object] | None
) -> AsyncIterator[AsyncIterator[str]]:
    """Opens a connection, sends a request and yields the lines of a good reply.

    Raises:
      ValueError: the status is not 200; the text has what the server said.
    """
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        connection = h11.Connection(h11.CLIENT)
        data = b"" if body is None else json.dumps(body).encode()
        headers = [("Host", target.host), ("Content-Length", str(len(data)))]
        headers += [("Content-Type", "application/json"), ("Connection", "close")]
        if target.api_key:
            headers.append(("Authorization", f"Bearer {target.api_key}"))
        request = h11.Request(method=method, target=target.path + path, headers=headers)
        for event in (request, h11.Data(data=data), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        yield _lines(connection, reader)
    finally:
        writer.close()


async def _lines(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[str]:
    status, rest = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            *whole, rest = (rest + event.data).split(b"\n")
            if status == 200:
                for line in whole:
                    yield line.decode()
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise EOFError("the connection closed early")
    if status != 200:
        raise ValueError(f"status {status}: {rest[:300].decode('utf-8', 'replace')}")
    if rest:
        yield rest.decode()
