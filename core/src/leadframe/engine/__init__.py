"""The step loop, in a thread of its own or driven by the caller."""

from __future__ import annotations

from leadframe.engine.async_engine import AsyncEngine
from leadframe.engine.core import Engine
from leadframe.engine.outputs import Completion, EngineHealth, RequestOutput, TokenLogprobs

__all__ = ["AsyncEngine", "Completion", "Engine", "EngineHealth", "RequestOutput", "TokenLogprobs"]
