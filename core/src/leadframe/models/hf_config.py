"""Turns a Hugging Face `config.json` into a `DecoderSpec`, and refuses what it does not know.

Transformers' config classes supply defaults and bring old spellings into one form. Every field
must be consumed here or be known not to change the mathematics; any other that is set is an
error, because a model that runs with wrong mathematics looks like a model that is bad.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.models.config_fields import CONSUMED, NEUTRAL, SOUNDS_MATHEMATICAL
from leadframe.models.config_values import GENERATION, check_config, check_values
from leadframe.models.info import GenerationDefaults
from leadframe.models.rope import RopeContext, rope_spec, served_context
from leadframe.models.spec import LIMITS, Activation, DecoderSpec, LayerSpec, RopeSpec, check_spec
from leadframe.platform.capabilities import AttnParams

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type fixes in code rather than in its config.

    Attributes:
      norm_offset: added to norm weights.
      sandwich_norms: norms after attention and MLP too.
      qk_norm: norms on q and k.
      scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
      qkv_bias: always there; None follows `attention_bias`.
      o_bias: always or never there; None follows `attention_bias`.
      all_sliding: a `sliding_window` applies to every layer.
      partial_rotary: `partial_rotary_factor` is honoured.
      wrapper: the language model is the `text_config` of a multimodal model.
    """

    norm_offset: float = 0.0
    sandwich_norms: bool = False
    qk_norm: bool = False
    scaled_embedding: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    all_sliding: bool = False
    partial_rotary: bool = False
    wrapper: bool = False


_GEMMA = Family(norm_offset=1.0, scaled_embedding=True)
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, o_bias=False, all_sliding=True),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(qk_norm=True),
    "smollm3": Family(),
    "phi3": Family(qkv_bias=False, o_bias=False, all_sliding=True, partial_rotary=True),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, sandwich_norms=True),
    "gemma3_text": replace(_GEMMA, sandwich_norms=True, qk_norm=True),
    "gemma3": replace(_GEMMA, sandwich_norms=True, qk_norm=True, wrapper=True),
}

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A directory's configuration.

    Attributes:
      spec: the mathematics.
      generation: what `generation_config.json` recommends.
      dtype: the element type that the authors saved or trained in.
    """

    spec: DecoderSpec
    generation: GenerationDefaults
    dtype: str


def read_hf_config(directory: Path, max_model_len: int | None = None) -> HFConfig:
    """Reads `config.json` and `generation_config.json`.

    Raises:
      CheckpointError: a file is missing or is not JSON.
      UnsupportedModel: the model type, or a field of it, is not implemented.
    """
    path = directory / "config.json"
    raw = read_json(path)
    family = _family(raw)
    raw_text = _text_config(raw, family, path)
    check_config(raw, path)
    if raw_text is not raw:
        check_config(raw_text, path)
    outer = _auto_config(directory)
    config = outer.get_text_config(decoder=True)
    _refuse_unknown(raw_text, config)
    try:
        spec = _spec(config, family, max_model_len)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not valid: {error}") from error
    tied = bool(config.tie_word_embeddings or outer.tie_word_embeddings)
    dtype = str(raw_text.get("dtype") or raw_text.get("torch_dtype") or raw.get("dtype") or "")
    return HFConfig(
        replace(spec, tied=tied), read_generation(directory, raw, raw_text), dtype or "float32"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      CheckpointError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _family(raw: Mapping[str, Any]) -> Family:
    model_type = str(raw.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} has no native model file; supported are "
            f"{', '.join(FAMILIES)}"
        )
    refuse_quantised(raw)
    return FAMILIES[model_type]


def refuse_quantised(raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for the config of a quantised checkpoint."""
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"the checkpoint is quantised (quantization_config: {str(method)[:64]!r}); serve the "
            "unquantised one, or a GGUF file"
        )


def _text_config(raw: Mapping[str, Any], family: Family, path: Path) -> Mapping[str, Any]:
    """Returns the part of a config that describes the language model."""
    text = raw.get("text_config")
    if text is None:
        return raw
    if not family.wrapper or not isinstance(text, dict):
        raise UnsupportedModel(
            f"{path}: text_config is {str(text)[:64]!r}; it must be an object, and only "
            "multimodal models have one"
        )
    return text


def refuse_deep(raw: Mapping[str, Any]) -> None:
    """Config classes build lists of this length before anything else is checked."""
    layers = raw.get("num_hidden_layers", 1)
    if isinstance(layers, int) and layers > LIMITS["num_hidden_layers"]:
        limit = LIMITS["num_hidden_layers"]
        raise UnsupportedModel(f"num_hidden_layers is {layers}; the limit is {limit}")


def _auto_config(directory: Path) -> Any:
    # Here and not at the top: it imports torch where that is installed, which GGUF never needs.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a config class raises about a value
        raise UnsupportedModel(f"{directory / 'config.json'} is not valid: {error}") from error


def _refuse_unknown(raw: Mapping[str, Any], config: Any) -> None:
    known = CONSUMED | NEUTRAL
    effective = {**config.to_dict(), **raw}
    own = set(type(config).__dataclass_fields__)
    refused = [
        f"{name}={value!r}"
        for name, value in sorted(effective.items())
        if value
        and name not in known
        and not name.startswith("_")
        and (name in own or SOUNDS_MATHEMATICAL.search(name))
    ]
    if refused:
        shown = ", ".join(refused)
        raise UnsupportedModel(
            f"config fields that may change the mathematics are not implemented: {shown[:500]}"
        )


def _spec(config: Any, family: Family, wanted: int | None) -> DecoderSpec:
    windows = _windows(config, family)
    head_dim = getattr(config, "head_dim", None) or _head_dim(config)
    scale = float(getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    cap = getattr(config, "attn_logit_softcapping", None)
    ropes, rope_of, context = _ropes(config, family, head_dim, wanted)
    bias = bool(getattr(config, "attention_bias", False))
    positioned = getattr(config, "no_rope_layers", None) or [True] * len(windows)
    if len(positioned) != len(windows):
        raise UnsupportedModel(
            f"no_rope_layers has {len(positioned)} entries; it must have one for each of the "
            f"{len(windows)} layers"
        )
    layers = tuple(
        LayerSpec(
            AttnParams.of(scale, window if window and window < context else None, cap),
            rope_of[kind] if has_rope else None,
        )
        for (kind, window), has_rope in zip(windows, positioned, strict=True)
    )
    spec = DecoderSpec(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_position_embeddings=context,
        norm_eps=float(config.rms_norm_eps),
        norm_offset=family.norm_offset,
        activation=_activation(config),
        embed_scale=config.hidden_size**0.5 if family.scaled_embedding else None,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )
    check_spec(spec)
    return spec


def _head_dim(config: Any) -> int:
    if config.hidden_size % config.num_attention_heads:
        raise UnsupportedModel(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
            f"{config.num_attention_heads} and there is no head_dim"
        )
    return int(config.hidden_size // config.num_attention_heads)


def _windows(config: Any, family: Family) -> Sequence[tuple[str, int | None]]:
    """Returns (layer type, window) of each layer."""
    window = getattr(config, "sliding_window", None)
    num_layers = config.num_hidden_layers
    if family.all_sliding:
        return [(FULL, window)] * num_layers
    kinds = getattr(config, "layer_types", None) or [FULL] * num_layers
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, of kinds "
            f"{', '.join(sorted(set(kinds)))}; supported are {FULL} and {SLIDING}"
        )
    if SLIDING in kinds and window is None:
        raise UnsupportedModel("layer_types has sliding layers but sliding_window is null")
    return [(kind, window if kind == SLIDING else None) for kind in kinds]


def _ropes(
    config: Any, family: Family, head_dim: int, wanted: int | None
) -> tuple[tuple[RopeSpec, ...], Mapping[str, int], int]:
    """Returns the distinct ropes, the one of each layer type, and the longest sequence."""
    params = config.rope_parameters
    nested = {kind: params[kind] for kind in (FULL, SLIDING) if params.get(kind)}
    by_kind = nested or {FULL: params, SLIDING: params}
    partial = {p.get("partial_rotary_factor") or 1.0 for p in by_kind.values()}
    if partial != {1.0} and not family.partial_rotary:
        raise UnsupportedModel(
            f"partial_rotary_factor is {partial}; {config.model_type!r} rotates whole heads"
        )
    longest = config.max_position_embeddings
    context = min(served_context(p, longest, wanted) for p in by_kind.values())
    where = RopeContext(head_dim, longest, context)
    specs = {kind: rope_spec(p, where) for kind, p in by_kind.items()}
    distinct = tuple(dict.fromkeys(specs.values()))
    return distinct, {kind: distinct.index(spec) for kind, spec in specs.items()}, context


def _activation(config: Any) -> Activation:
    name = str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))
    if config.model_type == "gemma":
        name = "gelu_pytorch_tanh"  # the config's "gelu" has always meant this one
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act is {name!r}; the activations that there are: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def read_generation(
    directory: Path, raw: Mapping[str, Any], raw_text: Mapping[str, Any]
) -> GenerationDefaults:
    """Returns what `generation_config.json` recommends, and ids that end an answer."""
    path = directory / "generation_config.json"
    given = read_json(path) if path.exists() else {}
    check_values(given, GENERATION, path)
    eos = next(
        (c["eos_token_id"] for c in (given, raw, raw_text) if c.get("eos_token_id") is not None), ()
    )
    numbers = {}
    if given.get("do_sample") is not False:
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            numbers[name] = given.get(name)
    ids = (eos,) if isinstance(eos, int) else tuple(eos)
    return GenerationDefaults(eos_token_ids=ids, **numbers)
