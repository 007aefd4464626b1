"""What a model takes, computed from its config: weights may not be there yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from leadframe.models.checkpoint import open_checkpoint
from leadframe.models.hf_config import read_hf_config
from leadframe.models.info import Parameter
from leadframe.models.locate import is_gguf, locate_model
from leadframe.models.model import DecoderModel, Model
from leadframe.models.ranks import heads_per_rank
from leadframe.models.spec import EMBED, LM_HEAD
from leadframe.platform.backend import KVLayerSpec


@dataclass(frozen=True, slots=True)
class Description:
    """A model without its weights.

    Attributes:
      model: its mathematics.
      name: what to call it.
    """

    model: Model
    name: str


def describe_model(path: str | Path | None = None) -> Description:
    """Reads what a model is from its `config.json` or its GGUF file; no other file is needed.

    Args:
      path: as for `open_checkpoint`.

    Raises:
      ModelNotFound: nothing that looks like a model is there.
      UnsupportedModel: it has no native model file, or a field that is not implemented.
      CheckpointError: a file is damaged.
    """
    located = locate_model(path)
    if is_gguf(located):
        checkpoint = open_checkpoint(located)
        return Description(checkpoint.model, checkpoint.name)
    config = read_hf_config(located)
    return Description(DecoderModel(config.spec, config.generation), located.resolve().name)


def rank_weight_bytes(model: Model, element_bytes: int, ranks: int = 1) -> int:
    """Returns the device bytes of one rank's weights and constants.

    A tied head is counted once, which holds where `Capabilities.plain_weights` does.

    Args:
      model: it divides by `ranks`; see `check_ranks`.
      element_bytes: bytes of an element on the device.
      ranks: devices that share the model.
    """
    own = (p for p in model.parameters.values() if p.tied_to is None)
    weights = element_bytes * sum(_rank_elements(parameter, ranks) for parameter in own)
    constants = model.constants.values()
    return weights + sum(v.size * (4 if own_dtype else element_bytes) for v, own_dtype in constants)


def rank_read_bytes(model: Model, element_bytes: int, ranks: int = 1) -> int:
    """Returns the bytes of weights that one rank reads in every step, however small.

    That is all of them, but for an embedding table that is not the head's too: of it a step reads
    a row a token.
    """
    total = rank_weight_bytes(model, element_bytes, ranks)
    if model.parameters[LM_HEAD].tied_to == EMBED:
        return total
    return total - element_bytes * _rank_elements(model.parameters[EMBED], ranks)


def rank_kv_layers(layers: Sequence[KVLayerSpec], ranks: int) -> list[KVLayerSpec]:
    """Returns the KV cache of one rank."""
    return [
        replace(layer, num_kv_heads=heads_per_rank(layer.num_kv_heads, ranks)) for layer in layers
    ]


def _rank_elements(parameter: Parameter, ranks: int) -> int:
    whole, cut = prod(parameter.shape), parameter.partition
    if cut.axis is None:
        return whole
    if cut.heads is None:
        return whole // ranks
    rows = heads_per_rank(cut.heads, ranks) * cut.unit
    return whole // parameter.shape[cut.axis] * rows


__all__ = [
    "Description",
    "describe_model",
    "rank_kv_layers",
    "rank_read_bytes",
    "rank_weight_bytes",
]
