"""Error replies: OpenAI's shape, bounded length, nothing of the process in them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import Response

from leadframe.errors import EngineDead, PromptTooLong, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
_MAX_LISTED_ERRORS = 5
_PIECE = 20_000
_PRIVATE = re.compile(r"0x[0-9a-fA-F]{6,}|(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+")

_TYPES = {
    401: "authentication_error",
    500: "server_error",
    503: "service_unavailable",
}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    503: "service_unavailable",
}


class HttpError(Exception):
    """A refusal that the HTTP layer itself decides.

    Attributes:
      status: the HTTP status.
      param: the field at fault, when one is.
      code: what a program may switch on.
      headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})


class JsonReply(Response):
    """JSON that never fails to encode, whatever characters the client sent."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encodes in ASCII: a lone surrogate in an echoed name cannot break it."""
        return _encoded(content).encode("ascii")


def _encoded(value: object) -> str:
    """Encodes JSON, a long list of a reply in pieces: other threads get their turn in between."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(name))}:{_encoded(item)}" for name, item in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list) and len(value) > _PIECE:
        pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
        return "[" + ",".join(_dumps(piece)[1:-1] for piece in pieces) + "]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def bounded(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Returns at most `limit` characters, with control characters escaped."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def scrubbed(text: str) -> str:
    """Returns a message of the engine without addresses and file paths, bounded."""
    return bounded(_PRIVATE.sub("…", text))


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Returns the body of an error reply."""
    error = {
        "message": bounded(message),
        "type": _TYPES.get(status, "invalid_request_error"),
        "param": None if param is None else bounded(param, 128),
        "code": code or _CODES.get(status),
    }
    return {"error": error}


def error_reply(error: Exception) -> JsonReply:
    """Returns the reply for any exception; what is not a known refusal becomes a bare 500."""
    status, body, headers = describe(error)
    return JsonReply(body, status, headers)


def describe(error: Exception) -> tuple[int, dict[str, object], dict[str, str]]:
    """Returns status, body and headers for any exception."""
    if isinstance(error, HttpError):
        body = error_body(error.status, str(error), error.param, error.code)
        return error.status, body, error.headers
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        headers = {"Retry-After": "1"} if error.status == 503 else {}
        return error.status, error_body(error.status, str(error), error.param, code), headers
    if isinstance(error, EngineDead):
        return 503, error_body(503, "the engine has stopped; this server is going down"), {}
    logger.error("a request failed", exc_info=error)
    return 500, error_body(500, "internal error; the server's log has the cause"), {}


def from_validation(error: ValidationError) -> HttpError:
    """Sums up what is wrong with a body: the first errors, each cut short, and how many more."""
    found = error.errors(include_url=False, include_input=False)
    shown = [_line(item["loc"], item["msg"]) for item in found[:_MAX_LISTED_ERRORS]]
    more = len(found) - len(shown)
    if more:
        shown.append(f"and {more} more errors")
    named = found[0].get("ctx", {}).get("param")
    param = _name((*found[0]["loc"], named) if named else found[0]["loc"]) or None
    return HttpError(400, "; ".join(shown), param=param)


def _name(location: tuple[int | str, ...]) -> str:
    return bounded(".".join(str(part)[:64] for part in location[:6]), 128)


def _line(location: tuple[int | str, ...], message: str) -> str:
    name = _name(location)
    message = bounded(message, 160)
    return f"{name}: {message}" if name else message
