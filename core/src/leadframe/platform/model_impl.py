"""Models whose mathematics is a library's own code, for one family of arrays.

A distribution registers a function `(directory) -> ModelImpl` in the entry-point group
`leadframe.model_impl`; the entry point's name is the `--model-impl` value. The core opens it when
a model has no native file, or when the user names it, and runs it on every backend whose
`Capabilities.family` is the implementation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from leadframe.platform.backend import KV, Array, Backend, KVLayerSpec
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the core must know about a model before its weights are read.

    Attributes:
      architecture: the name of what runs it, shown to people.
      vocab_size: width of the logits.
      hidden_size: E.
      max_position_embeddings: longest sequence that it serves.
      num_heads: query heads a layer.
      kv_layers: the KV cache of each layer.
      attn: the attention of each layer.
      num_parameters: elements of all weights, a tied one counted once.
      eos_token_ids: tokens that end an answer, where the checkpoint's files name none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_heads: int
    kv_layers: tuple[KVLayerSpec, ...]
    attn: tuple[AttnParams, ...]
    num_parameters: int
    eos_token_ids: tuple[int, ...] = ()


class ModelImpl(Protocol):
    """A model that was opened: described, its weights not read yet.

    What it computes is the core's contract with any model: tokens meet only in `ops.attention`,
    a sequence's results depend on its own tokens and positions, padded rows are harmless.
    """

    @property
    def family(self) -> str:
        """The arrays that it computes with, as in `Capabilities.family`."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes and attention."""

    def load(
        self, backend: Backend, dtype: str, progress: Callable[[int, int], None] | None
    ) -> Mapping[str, Array]:
        """Reads the weights onto a device; what it returns is passed to the two functions below.

        Args:
          backend: the device; its family is that of the model.
          dtype: element type of weights and activations.
          progress: called with (done, total) bytes.

        Raises:
          CheckpointError: a weight is missing, of another shape, or has no use.
          DeviceOOM: the weights do not fit.
        """

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""


OpenModelImpl = Callable[[Path], ModelImpl]
"""What an entry point of the group resolves to; it raises `UnsupportedModel`."""

__all__ = ["ModelFacts", "ModelImpl", "OpenModelImpl"]
