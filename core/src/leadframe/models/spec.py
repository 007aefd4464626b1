"""The description of a decoder that `decoder.py` runs: every number that changes the mathematics.

It is built from a Hugging Face config or from GGUF metadata, and knows neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from leadframe.errors import UnsupportedModel
from leadframe.models.info import Parameter
from leadframe.platform.backend import Partition, WeightRole
from leadframe.platform.capabilities import AttnParams

EMBED: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
LM_HEAD: Final = "lm_head.weight"
EMBED_SCALE: Final = "embed_scale"

Activation = Literal["silu", "gelu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding.

    Attributes:
      inv_freq: angle per position of each pair of dimensions, float32 values; R/2 of them.
      scaling: multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between layers.

    Attributes:
      attn: the attention.
      rope: index into `DecoderSpec.ropes`; None for a layer without positions.
    """

    attn: AttnParams
    rope: int | None = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A dense pre-norm decoder.

    Attributes:
      architecture: the Transformers model type.
      vocab_size: V.
      hidden_size: E.
      intermediate_size: width of the MLP.
      num_heads: query heads.
      num_kv_heads: KV heads.
      head_dim: D.
      layers: one entry a layer.
      ropes: the distinct rotary embeddings.
      max_position_embeddings: longest sequence served.
      norm_eps: of every RMS norm.
      norm_offset: added to every norm weight; 1 for Gemma.
      activation: gate of the MLP; "gelu" is the tanh approximation.
      embed_scale: multiplies embeddings; None leaves them.
      final_softcap: caps the logits; None leaves them.
      qk_norm: an RMS norm over each head of q and k, before the rotation.
      sandwich_norms: a norm after attention and after the MLP too.
      qkv_bias: q, k and v have a bias.
      o_bias: the attention output has a bias.
      mlp_bias: the MLP projections have a bias.
      tied: the head is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    norm_offset: float = 0.0
    activation: Activation = "silu"
    embed_scale: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False


LIMITS: Final = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
}
"""Sizes beyond which a config is damaged: far above every model, and nothing overflows below."""


def check_spec(spec: DecoderSpec) -> None:
    """Checks what no weights could have, under the names of a Hugging Face config.

    Raises:
      UnsupportedModel: a size or a number is out of range, or heads do not divide.
    """
    sizes = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
    }
    for name, value in sizes.items():
        if not 1 <= value <= LIMITS[name]:
            raise UnsupportedModel(f"{name} is {value}; it must be in [1, {LIMITS[name]}]")
    if not 0 < spec.norm_eps < 1:
        raise UnsupportedModel(f"rms_norm_eps is {spec.norm_eps}; it must be in (0, 1)")
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads is {spec.num_kv_heads}; it must divide num_attention_heads, "
            f"{spec.num_heads}"
        )


def layer_prefix(index: int) -> str:
    """Returns what the names of a layer's parameters start with."""
    return f"model.layers.{index}."


def rope_name(index: int) -> str:
    """Returns the name under which the frequencies of a rope are uploaded."""
    return f"rope.{index}.inv_freq"


def decoder_parameters(spec: DecoderSpec) -> dict[str, Parameter]:
    """Lists every weight of a decoder under its Hugging Face name."""
    vocab = (spec.vocab_size, spec.hidden_size)
    table = {EMBED: Parameter(vocab, Partition(0), "embed")}
    layer = dict(_layer_parameters(spec))
    for index in range(len(spec.layers)):
        table.update({layer_prefix(index) + name: entry for name, entry in layer.items()})
    table[FINAL_NORM] = _replicated(spec.hidden_size)
    table[LM_HEAD] = Parameter(vocab, Partition(0), "linear", EMBED if spec.tied else None)
    return table


def _replicated(*shape: int) -> Parameter:
    return Parameter(shape, Partition(), "tensor")


def _layer_parameters(spec: DecoderSpec) -> Iterator[tuple[str, Parameter]]:
    yield "input_layernorm.weight", _replicated(spec.hidden_size)
    yield "post_attention_layernorm.weight", _replicated(spec.hidden_size)
    if spec.sandwich_norms:
        yield "pre_feedforward_layernorm.weight", _replicated(spec.hidden_size)
        yield "post_feedforward_layernorm.weight", _replicated(spec.hidden_size)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", _replicated(spec.head_dim)
        yield "self_attn.k_norm.weight", _replicated(spec.head_dim)
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        cut = Partition(0, heads, spec.head_dim)
        out = heads * spec.head_dim
        yield from _column(f"self_attn.{name}_proj", out, spec.hidden_size, cut, spec.qkv_bias)
    width = spec.num_heads * spec.head_dim
    cut = Partition(1, spec.num_heads, spec.head_dim)
    yield from _row("self_attn.o_proj", spec.hidden_size, width, cut, spec.o_bias)
    sizes = (spec.intermediate_size, spec.hidden_size)
    yield from _column("mlp.gate_proj", *sizes, Partition(0), spec.mlp_bias)
    yield from _column("mlp.up_proj", *sizes, Partition(0), spec.mlp_bias)
    yield from _row("mlp.down_proj", *sizes[::-1], Partition(1), spec.mlp_bias)


_LINEAR: Final[WeightRole] = "linear"


def _column(
    name: str, out: int, width: int, cut: Partition, bias: bool
) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter((out, width), cut, _LINEAR)
    if bias:
        yield f"{name}.bias", Parameter((out,), cut, "tensor")


def _row(
    name: str, out: int, width: int, cut: Partition, bias: bool
) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter((out, width), cut, _LINEAR)
    if bias:  # added once, after the ranks' partial sums: every rank holds all of it
        yield f"{name}.bias", _replicated(out)
