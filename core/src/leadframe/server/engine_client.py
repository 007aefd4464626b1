"""What the server needs of an engine; `leadframe.engine.AsyncEngine` fits, tests script others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from leadframe.engine.outputs import EngineHealth, RequestOutput
from leadframe.metrics import EngineMetrics
from leadframe.models.info import ModelInfo
from leadframe.sampling_params import SamplingParams
from leadframe.tokenizer import Tokenizer


class RequestStream(Protocol):
    """The outputs of one request that the engine accepted."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Iterates over the outputs; the last one is finished."""

    def close(self) -> None:
        """Aborts the request unless it has finished. Never blocks; harmless when repeated."""


class EngineClient(Protocol):
    """An engine that serves many requests at once from one event loop."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model."""

    @property
    def model_name(self) -> str:
        """The model's own name."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, as fitted at start-up."""

    @property
    def device_summary(self) -> str:
        """One line that names the platform and the device."""

    @property
    def metrics(self) -> EngineMetrics:
        """The counters of the engine."""

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Queues a request; leaving this call early aborts it.

        Raises:
          RequestError: the request cannot be served; nothing was queued.
          EngineDead: the engine stopped.
        """

    def health(self) -> EngineHealth:
        """Says whether the engine is alive and moving; cheap."""

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Lets live requests finish for a while, then aborts the rest and stops."""
