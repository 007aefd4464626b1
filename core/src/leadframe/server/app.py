"""The application: routes, who may call them, and what errors become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leadframe.metrics.engine_metrics import CONTENT_TYPE
from leadframe.server.auth import KeyGuard
from leadframe.server.chat import create_chat_completion
from leadframe.server.completions import create_completion
from leadframe.server.middleware import RequestLog
from leadframe.server.replies import HttpError, JsonReply, error_reply
from leadframe.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from leadframe.server.services import VERSION, Services
from leadframe.server.streaming import ClientGone

Handler = Callable[[Services, Request], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

OPEN_PATHS = frozenset({"/health", "/health/ready"})
"""The routes that never need a key."""


def create_app(services: Services) -> FastAPI:
    """Builds the application for one engine."""
    app = FastAPI(title="Leadframe", version=VERSION, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    open_endpoints = []
    for method, path, handler, body in _ROUTES:
        endpoint = _endpoint(services, handler)
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=JsonReply,
            response_model=None,
            name=handler.__name__,
            openapi_extra=_documented(body),
        )
        if path in OPEN_PATHS:
            open_endpoints.append(endpoint)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(
        KeyGuard,
        routes=app.router.routes,
        keys=services.config.api_keys,
        open_endpoints=open_endpoints,
    )
    app.add_middleware(RequestLog)
    return app


def _endpoint(services: Services, handler: Handler) -> Endpoint:
    """Makes an endpoint whose every failure is a bounded reply in OpenAI's shape."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(services, request)
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            return error_reply(error)

    return endpoint


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answers what the router refuses: unknown paths and methods."""
    if not isinstance(error, HTTPException):
        return error_reply(error)
    path, method = request.url.path[:128], request.method[:16]
    messages = {
        404: f"no route {path!r}; GET /openapi.json lists what there is",
        405: f"{path!r} does not take {method!r}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return error_reply(HttpError(error.status_code, message, headers=error.headers))


def _documented(body: type[Body] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replaces references by what they refer to; request bodies have no recursive types."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


# --- the small routes -------------------------------------------------------------------


async def list_models(services: Services, _: Request) -> Response:
    """Lists the names of the model."""
    data = [_model(services, name) for name in services.model_names]
    return JsonReply({"object": "list", "data": data})


async def get_model(services: Services, request: Request) -> Response:
    """Describes one name of the model."""
    name = services.check_model(request.path_params["model"])
    return JsonReply(_model(services, name))


def _model(services: Services, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": services.started,
        "owned_by": "leadframe",
        "root": services.engine.model_name,
        "max_model_len": services.engine.max_model_len,
    }


async def tokenize(services: Services, request: Request) -> Response:
    """Returns the ids that generation would use for a text or a conversation."""
    body = await services.read(request, TokenizeBody)
    services.check_model(body.model)
    if body.prompt is not None:
        ids = await services.prompts.tokens(body.prompt, body.add_special_tokens)
    else:
        ids = (await services.prompts.chat(body)).token_ids
    tokenizer = services.engine.tokenizer

    def reply() -> JsonReply:
        shown: dict[str, object] = {
            "count": len(ids),
            "max_model_len": services.engine.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            shown["token_strs"] = [tokenizer.token_text(i) for i in ids]
        return JsonReply(shown)

    return await services.prompts.run_json(reply)


async def detokenize(services: Services, request: Request) -> Response:
    """Returns the text of token ids."""
    body = await services.read(request, DetokenizeBody)
    services.check_model(body.model)
    width = services.engine.model_info.vocab_size
    tokenizer = services.engine.tokenizer

    def reply() -> JsonReply:
        for token in body.tokens:
            if token >= width:
                raise HttpError(400, f"token {token} is not in [0, {width})", param="tokens")
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonReply({"prompt": text})

    return await services.prompts.run_json(reply)


async def health(services: Services, _: Request) -> Response:
    """Liveness: whether the engine is idle or makes progress."""
    state = services.engine.health()
    if not state.alive:
        raise HttpError(503, f"not alive: {state.reason}", code="not_alive")
    return JsonReply({"status": "ok", "running": state.running, "waiting": state.waiting})


async def ready(services: Services, _: Request) -> Response:
    """Readiness: whether new requests are served."""
    state = services.engine.health()
    if services.draining or not (state.ready and state.alive):
        reason = "draining" if services.draining else state.reason or "the model is not loaded"
        raise HttpError(503, f"not ready: {reason}", code="not_ready")
    return JsonReply({"status": "ready"})


async def metrics(services: Services, _: Request) -> Response:
    """Prometheus' exposition."""
    return Response(services.engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def version(_services: Services, _: Request) -> Response:
    """The version of Leadframe."""
    return JsonReply({"version": VERSION})


_ROUTES: tuple[tuple[str, str, Handler, type[Body] | None], ...] = (
    ("GET", "/health", health, None),
    ("GET", "/health/ready", ready, None),
    ("GET", "/metrics", metrics, None),
    ("GET", "/version", version, None),
    ("GET", "/v1/models", list_models, None),
    ("GET", "/v1/models/{model:path}", get_model, None),
    ("POST", "/v1/completions", create_completion, CompletionBody),
    ("POST", "/v1/chat/completions", create_chat_completion, ChatBody),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
)
