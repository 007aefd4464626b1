"""What the rest of the engine may know about a model: sizes, attention, defaults. No weights."""

from __future__ import annotations

from dataclasses import dataclass

from leadframe.platform.backend import KVLayerSpec, Partition, WeightRole
from leadframe.platform.capabilities import AttnParams


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors recommend; None where they say nothing.

    Attributes:
      eos_token_ids: tokens that end an answer.
      temperature: for the sampler.
      top_p: for the sampler.
      top_k: for the sampler.
      min_p: for the sampler.
      repetition_penalty: for the sampler.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model that scheduler, runner and API need.

    Attributes:
      architecture: the Transformers model type, such as "llama".
      vocab_size: width of the logits; may exceed what the tokenizer knows.
      hidden_size: E.
      max_position_embeddings: longest sequence that the weights and rotary table serve.
      num_heads: query heads a layer.
      kv_layers: the KV cache of each layer.
      attn: the attention of each layer.
      eos_token_ids: tokens that end an answer.
      weight_bytes: bytes of the weights as they are stored in the checkpoint.
      num_parameters: elements of all weights, a tied one counted once.
      generation: what the model's authors recommend.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_heads: int
    kv_layers: tuple[KVLayerSpec, ...]
    attn: tuple[AttnParams, ...]
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    num_parameters: int
    generation: GenerationDefaults


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight that a step reads by name.

    Attributes:
      shape: the shape of the whole weight, [out, in] for projections.
      partition: how tensor parallelism cuts it.
      role: the op that reads it.
      tied_to: the parameter whose values it shares; None for one of its own.
    """

    shape: tuple[int, ...]
    partition: Partition
    role: WeightRole
    tied_to: str | None = None
