"""A model as the engine sees it: facts, parameters, and two pure functions over ops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from leadframe.models import decoder
from leadframe.models.info import GenerationDefaults, ModelInfo, Parameter
from leadframe.models.spec import (
    EMBED_SCALE,
    DecoderSpec,
    decoder_parameters,
    layer_prefix,
    rope_name,
)
from leadframe.platform.backend import KV, Array, KVLayerSpec
from leadframe.platform.batch import StepArrays
from leadframe.platform.ops import Ops


class Model(Protocol):
    """What the engine, the runner and the loader need of a model."""

    @property
    def info(self) -> ModelInfo:
        """Sizes, attention and defaults."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Every weight that the checkpoint must provide, by Hugging Face name."""

    @property
    def constants(self) -> Mapping[str, tuple[npt.NDArray[np.float32], str | None]]:
        """Small arrays that come from the config: value, and dtype or None for the model's."""

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""


class DecoderModel:
    """A dense pre-norm decoder.

    Args:
      spec: the description of its mathematics.
      generation: what its authors recommend.
      weight_bytes: bytes of its weights in the checkpoint.
    """

    def __init__(
        self, spec: DecoderSpec, generation: GenerationDefaults, weight_bytes: int = 0
    ) -> None:
        self.spec = spec
        self.parameters: Mapping[str, Parameter] = decoder_parameters(spec)
        self._layer_names = [_local_names(self.parameters, i) for i in range(len(spec.layers))]
        self._generation, self._weight_bytes = generation, weight_bytes

    @cached_property
    def info(self) -> ModelInfo:
        """Sizes, attention and defaults."""
        spec = self.spec
        own = (p for p in self.parameters.values() if p.tied_to is None)
        return ModelInfo(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_position_embeddings=spec.max_position_embeddings,
            num_heads=spec.num_heads,
            kv_layers=(KVLayerSpec(spec.num_kv_heads, spec.head_dim),) * len(spec.layers),
            attn=tuple(layer.attn for layer in spec.layers),
            eos_token_ids=self._generation.eos_token_ids,
            weight_bytes=self._weight_bytes,
            num_parameters=sum(prod(p.shape) for p in own),
            generation=self._generation,
        )

    @property
    def constants(self) -> Mapping[str, tuple[npt.NDArray[np.float32], str | None]]:
        """Rotary frequencies, always float32; the embedding scale, rounded to the model's dtype."""
        table: dict[str, tuple[npt.NDArray[np.float32], str | None]] = {
            rope_name(index): (np.asarray(rope.inv_freq, np.float32), "float32")
            for index, rope in enumerate(self.spec.ropes)
        }
        if self.spec.embed_scale is not None:
            table[EMBED_SCALE] = (np.asarray([self.spec.embed_scale], np.float32), None)
        return table

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""
        return decoder.forward(ops, self.spec, self._layer_names, weights, kv, arrays)

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""
        return decoder.logits(ops, self.spec, weights, rows)


def _local_names(parameters: Mapping[str, Any], index: int) -> decoder.LayerNames:
    prefix = layer_prefix(index)
    return [(name.removeprefix(prefix), name) for name in parameters if name.startswith(prefix)]
