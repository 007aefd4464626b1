"""A model that a library's own code runs, as the rest of the core sees every model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from leadframe.models.info import GenerationDefaults, ModelInfo, Parameter
from leadframe.platform.backend import KV, Array, Backend
from leadframe.platform.batch import StepArrays
from leadframe.platform.model_impl import ModelImpl
from leadframe.platform.ops import Ops


class LibraryModel:
    """Adapts a `ModelImpl` to `Model`. It loads its weights itself, so it lists none.

    Args:
      impl: the model.
      generation: what its authors recommend.
      weight_bytes: bytes of its weights in the checkpoint.
      asked_for: why it runs this model, for errors: the setting, or that there is no native file.
    """

    parameters: Final[Mapping[str, Parameter]] = {}
    constants: Final[Mapping[str, tuple[npt.NDArray[np.float32], str | None]]] = {}

    def __init__(
        self, impl: ModelImpl, generation: GenerationDefaults, weight_bytes: int, asked_for: str
    ) -> None:
        self._impl, self.asked_for = impl, asked_for
        facts = impl.facts
        self.family = impl.family
        self.info = ModelInfo(
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            max_position_embeddings=facts.max_position_embeddings,
            num_heads=facts.num_heads,
            kv_layers=facts.kv_layers,
            attn=facts.attn,
            eos_token_ids=generation.eos_token_ids,
            weight_bytes=weight_bytes,
            num_parameters=facts.num_parameters,
            generation=generation,
        )

    def load(
        self, backend: Backend, dtype: str, progress: Callable[[int, int], None] | None
    ) -> Mapping[str, Array]:
        """Reads the weights onto a device of its family."""
        return self._impl.load(backend, dtype, progress)

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""
        return self._impl.forward(ops, weights, kv, arrays)

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""
        return self._impl.logits(ops, weights, rows)
