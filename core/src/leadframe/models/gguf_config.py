"""Turns GGUF metadata into a `DecoderSpec`, and refuses what it does not know.

GGUF says what changes from model to model; what llama.cpp writes in code for an architecture is
in the table here. No Transformers and no array framework is needed to serve a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.gguf_file import GGUFFile
from leadframe.models.config_values import is_integer
from leadframe.models.hf_config import FAMILIES
from leadframe.models.info import GenerationDefaults
from leadframe.models.rope import RopeContext, rope_spec
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec, check_spec
from leadframe.platform.capabilities import AttnParams


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp's code fixes for an architecture.

    Attributes:
      family: the Transformers model type with the same mathematics.
      permuted: rows of q and k are stored for the interleaved rotation.
      norm_shift: added to every norm weight when the file was written.
      pattern: every n-th layer is full, the others slide; 0 means that all are alike.
      local_theta: rotary base of sliding layers; None means that of the others.
      wide_scale_layers: models with this many layers scale scores by hidden_size / num_heads
        instead of head_dim.
    """

    family: str
    permuted: bool = False
    norm_shift: float = 0.0
    pattern: int = 0
    local_theta: float | None = None
    wide_scale_layers: int | None = None


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_shift=1.0),
    "gemma2": Architecture("gemma2", norm_shift=1.0, pattern=2, wide_scale_layers=46),
    "gemma3": Architecture(
        "gemma3_text", norm_shift=1.0, pattern=6, local_theta=10_000.0, wide_scale_layers=62
    ),
}

_CONSUMED: Final = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.finetuned",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)
_MAX_LAYERS: Final = 1024


class _Metadata:
    """The metadata of one architecture, with errors that name the key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, or `default`."""
        return self._file.metadata.get(self._prefix + key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer, or `default` where there is none."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._file.path}: {self._prefix}{key} is {value!r}; it must be a positive "
                "integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Returns a number above 0, or `default` where there is none."""
        value = self.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(
                f"{self._file.path}: {self._prefix}{key} is {value!r}; it must be a positive number"
            )
        return float(value)

    def refuse_unknown(self) -> None:
        """Raises for a key that is set and not consumed."""
        for name, value in self._file.metadata.items():
            key = name.removeprefix(self._prefix)
            if key != name and value and key not in _CONSUMED:
                raise UnsupportedModel(
                    f"{self._file.path}: {name} = {str(value)[:80]} may change the mathematics and "
                    "is not implemented"
                )


def gguf_architecture(file: GGUFFile) -> Architecture:
    """Returns what is known about the file's architecture.

    Raises:
      UnsupportedModel: it is not in the table.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} has architecture {name!r}; supported GGUF architectures are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_gguf_config(file: GGUFFile, rope_factors: tuple[float, ...] | None) -> DecoderSpec:
    """Builds the description of a GGUF model.

    Args:
      file: the validated header.
      rope_factors: `rope_freqs.weight`, by which frequencies are divided, if the file has it.

    Raises:
      UnsupportedModel: the architecture or a key is not implemented.
      CheckpointError: a key is missing or absurd.
    """
    arch = gguf_architecture(file)
    data = _Metadata(file, file.metadata["general.architecture"])
    data.refuse_unknown()
    family = FAMILIES[arch.family]
    hidden, heads = data.count("embedding_length"), data.count("attention.head_count")
    head_dim = data.count("attention.key_length", hidden // heads)
    if data.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: keys and values have different head dimensions")
    ropes, layers = _layers(data, arch, head_dim, rope_factors)
    biased = "blk.0.attn_q.bias" in file.tensors
    spec = DecoderSpec(
        architecture=arch.family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=data.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=data.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_position_embeddings=data.count("context_length"),
        norm_eps=data.number("attention.layer_norm_rms_epsilon", 1e-6) or 1e-6,
        norm_offset=family.norm_offset,
        activation="gelu" if family.scaled_embedding else "silu",
        embed_scale=hidden**0.5 if family.scaled_embedding else None,
        final_softcap=data.number("final_logit_softcapping"),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        qkv_bias=biased,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tied="output.weight" not in file.tensors,
    )
    check_spec(spec)
    return spec


def gguf_generation(file: GGUFFile) -> GenerationDefaults:
    """Returns the end-of-sequence ids that the metadata names.

    Raises:
      CheckpointError: one is not an integer.
    """
    ids: dict[int, None] = {}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if not is_integer(value):
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.{key} is {str(value)[:64]!r}; it must be a token id"
            )
        ids[value] = None
    return GenerationDefaults(eos_token_ids=tuple(ids))


def _vocab_size(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{file.path} has no embedding matrix `token_embd.weight`")
    return table.shape[0]


def _layers(
    data: _Metadata, arch: Architecture, head_dim: int, factors: tuple[float, ...] | None
) -> tuple[tuple[RopeSpec, ...], tuple[LayerSpec, ...]]:
    count = data.count("block_count")
    if count > _MAX_LAYERS:
        raise CheckpointError(f"block_count is {count}; the limit is {_MAX_LAYERS}")
    wide = count == arch.wide_scale_layers
    per_head = data.count("embedding_length") // data.count("attention.head_count")
    scale = float(per_head if wide else head_dim) ** -0.5
    cap = data.number("attn_logit_softcapping")
    window = data.count("attention.sliding_window", 0) or None
    theta = data.number("rope.freq_base", 10_000.0)
    ropes = [_rope(data, head_dim, theta, factors)]
    local_theta = data.number("rope.freq_base_swa", arch.local_theta)
    if arch.pattern and local_theta is not None:
        where = RopeContext(head_dim, data.count("context_length"), data.count("context_length"))
        ropes.append(rope_spec({"rope_theta": local_theta}, where))
    layers = []
    for sliding in _sliding_layers(data, arch, count, window):
        attn = AttnParams.of(scale, window if sliding else None, cap)
        layers.append(LayerSpec(attn, len(ropes) - 1 if sliding else 0))
    return tuple(ropes), tuple(layers)


def _sliding_layers(
    data: _Metadata, arch: Architecture, count: int, window: int | None
) -> list[bool]:
    """Whether each layer has a window."""
    if window is None or not arch.pattern:
        return [window is not None] * count
    pattern = data.get("attention.sliding_window_pattern", arch.pattern)
    if isinstance(pattern, list) and len(pattern) == count:
        return [bool(sliding) for sliding in pattern]
    period = data.count("attention.sliding_window_pattern", arch.pattern)
    return [(index + 1) % period != 0 for index in range(count)]


_SCALING_KEYS: Final = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
    },
}


def _rope(
    data: _Metadata, head_dim: int, theta: float | None, factors: tuple[float, ...] | None
) -> RopeSpec:
    kind = data.get("rope.scaling.type", "none")
    if kind not in _SCALING_KEYS:
        raise UnsupportedModel(
            f"rope.scaling.type is {kind!r}; supported are {', '.join(_SCALING_KEYS)}"
        )
    params: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": theta,
    }
    params["partial_rotary_factor"] = data.count("rope.dimension_count", head_dim) / head_dim
    for name, key in _SCALING_KEYS[kind].items():
        params[name] = data.get(f"rope.scaling.{key}")
    context = data.count("context_length")
    spec = rope_spec(params, RopeContext(head_dim, context, context))
    if factors is None:
        return spec
    if len(factors) != len(spec.inv_freq):
        raise CheckpointError(
            f"rope_freqs.weight has {len(factors)} entries; {len(spec.inv_freq)} are needed"
        )
    pairs = zip(spec.inv_freq, factors, strict=True)
    return RopeSpec(tuple(freq / factor for freq, factor in pairs), spec.scaling)
