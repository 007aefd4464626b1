"""What the routes share: the engine, the readers of text and parameters, the names, the state."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
import uuid
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from leadframe.sampling_params import SamplingParams
from leadframe.server.engine_client import EngineClient
from leadframe.server.fields import MAX_CHOICES
from leadframe.server.generation import Batch, Job
from leadframe.server.prompts import PromptReader, ReadPrompt
from leadframe.server.replies import HttpError, from_validation
from leadframe.server.sampling import ParamsReader
from leadframe.server.schema import Body, SamplingBody
from leadframe.server.settings import ServerConfig

B = TypeVar("B", bound=Body)

VERSION: Final = importlib.metadata.version("leadframe")
FINGERPRINT: Final = f"leadframe-{VERSION}"
_INLINE_BYTES = 64 << 10
_DISCARDED_BYTES = 256 << 20
"""A refused body up to this size is taken and dropped: closed earlier, the client would see a
broken connection and no reply."""
_BODY_SECONDS = 60.0
"""A body that takes longer than this to arrive is given up."""


@dataclass(slots=True)
class Services:
    """One instance a server.

    Attributes:
      draining: new generations are refused, because the server is going down.
      live: what is being generated now, one entry an HTTP request.
    """

    engine: EngineClient
    config: ServerConfig
    chat_template: str | None = None
    draining: bool = False
    live: set[object] = field(default_factory=set)
    started: int = field(default_factory=lambda: int(time.time()))
    prompts: PromptReader = field(init=False)
    params: ParamsReader = field(init=False)

    def __post_init__(self) -> None:
        """Builds the readers."""
        tokenizer = self.engine.tokenizer
        recommended = self.engine.model_info.generation
        use_model = self.config.generation_config == "model"
        self.prompts = PromptReader(tokenizer, self.engine.max_model_len, self.chat_template)
        facts = {"version": VERSION, "device": self.engine.device_summary}
        self.engine.metrics.set_info("engine_info", facts)
        self.engine.metrics.model_name = self.model_names[0]
        self.params = ParamsReader(tokenizer, recommended if use_model else None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is the one that replies show."""
        return self.config.served_model_names or (self.engine.model_name,)

    async def read(self, request: Request, model: type[B]) -> B:
        """Reads and checks a JSON body; a long one is parsed away from the event loop.

        Raises:
          HttpError: it is too large, too slow, not JSON, or not what the route takes.
        """
        data = await _read_body(request, self.config.max_body_bytes)

        def parse() -> B:
            try:
                return model.model_validate_json(data)
            except ValidationError as error:
                raise from_validation(error) from None

        return parse() if len(data) <= _INLINE_BYTES else await self.prompts.run_json(parse)

    def check_model(self, name: str | None) -> str:
        """Returns the name that the reply shows.

        Raises:
          HttpError: this server does not serve that model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise HttpError(
                404,
                f"model {name[:64]!r} does not exist here; this server serves {served}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_accepting(self, body: SamplingBody) -> None:
        """Refuses what cannot be served now.

        Raises:
          HttpError: the server is going down, or `priority` would not be obeyed.
        """
        if self.draining:
            raise HttpError(503, "the server is going down", headers={"Retry-After": "5"})
        if body.priority and not self.config.accept_priority:
            raise HttpError(
                400,
                f"priority is {body.priority}, but the scheduling policy is fcfs; start the "
                "server with --scheduling-policy priority, or leave it out",
                param="priority",
            )

    async def submit(
        self,
        base_id: str,
        body: SamplingBody,
        prompts: list[ReadPrompt],
        params: list[SamplingParams],
    ) -> Batch:
        """Queues every choice of every prompt, in the order of the reply.

        Raises:
          RequestError: the engine refuses one of them; nothing stays queued.
        """
        pairs = [(prompt, choice) for prompt in prompts for choice in params]
        if len(pairs) > MAX_CHOICES:
            raise HttpError(
                400, f"{len(pairs)} choices are asked; at most {MAX_CHOICES} fit one request"
            )
        jobs = [
            Job(f"{base_id}-{i}", prompt, choice, body.priority or 0, body.cache_salt or "")
            for i, (prompt, choice) in enumerate(pairs)
        ]
        compiling = object()  # it may wait for its constraint for seconds
        self.live.add(compiling)
        try:
            batch = await Batch.submit(self.engine, jobs, on_close=self.live.discard)
        finally:
            self.live.discard(compiling)
        self.live.add(batch)
        return batch


def new_id(kind: str) -> str:
    """Returns an id that no other request has, whatever the client sent."""
    return f"{kind}-{uuid.uuid4().hex}"


async def _read_body(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    declared = int(length[:20]) if length.isdigit() else 0
    too_large = HttpError(
        413,
        f"the body is larger than {limit:,} bytes; send less, or start the server with a larger "
        "--max-body-bytes",
        headers={"Connection": "close"} if declared > _DISCARDED_BYTES else None,
    )
    if declared > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise HttpError(
            408, f"the body took over {_BODY_SECONDS:.0f} s", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise HttpError(400, "the body ended early") from None
    return b"".join(chunks)
