"""Leadframe serves language models on any accelerator through one narrow platform interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leadframe.sampling_params import SamplingParams
from leadframe.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from leadframe.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> object:
    """Imports `LLM` when it is first used: `import leadframe` alone stays fast."""
    if name == "LLM":
        from leadframe.llm import LLM

        return LLM
    raise AttributeError(f"module 'leadframe' has no attribute {name!r}")
