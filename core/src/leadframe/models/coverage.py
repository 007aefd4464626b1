"""Matches what a model needs with what a checkpoint holds; nothing may be left over or missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.models.sources import NUMPY_DTYPES, PlainWeight, StoredWeight
from leadframe.models.spec import EMBED, LM_HEAD, DecoderSpec, decoder_parameters

Found = Mapping[str, StoredWeight]

_SHOWN: Final = 8
_TEXT_PREFIXES: Final = ("model.language_model.", "language_model.model.")
_IGNORED_PREFIXES: Final = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


def text_names(found: Found) -> dict[str, StoredWeight]:
    """Renames the language model of a multimodal checkpoint to what it is called alone.

    Its other towers, and frequencies that old checkpoints stored, are dropped.
    """
    named = {}
    for name, weight in found.items():
        if name.startswith(_IGNORED_PREFIXES) or name.endswith(".rotary_emb.inv_freq"):
            continue
        for prefix in _TEXT_PREFIXES:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        named[name.removeprefix("language_model.")] = weight
    return named


def split_fused(spec: DecoderSpec, found: Found) -> dict[str, StoredWeight]:
    """Gives the parts of fused projections the names of parts; nothing is read or copied."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = {
        "self_attn.qkv_proj.weight": {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads},
        "mlp.gate_up_proj.weight": dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size),
    }
    named = dict(found)
    for name in found:
        for suffix, sizes in parts.items():
            weight = named[name] if name.endswith(suffix) else None
            if isinstance(weight, PlainWeight) and weight.shape[0] == sum(sizes.values()):
                del named[name]
                prefix, start = name.removesuffix(suffix), 0
                for part, size in sizes.items():
                    leaf = f"{suffix.split('.')[0]}.{part}.weight"
                    named[prefix + leaf] = weight.rows(start, start + size)
                    start += size
    return named


def settle_tie(spec: DecoderSpec, found: Found) -> tuple[DecoderSpec, Found]:
    """Decides whether the head is the embedding, from the config and from what is there.

    As in Transformers: a tied model may store the one matrix under either name or both, and two
    that differ are not tied whatever the config says.
    """
    if not spec.tied or LM_HEAD not in found:
        return spec, found
    head, rest = found[LM_HEAD], {k: v for k, v in found.items() if k != LM_HEAD}
    if EMBED not in rest:
        return spec, {**rest, EMBED: head}
    if head.shape == rest[EMBED].shape and np.array_equal(head.read(), rest[EMBED].read()):
        return spec, rest
    return replace(spec, tied=False), found


def cover(where: object, spec: DecoderSpec, found: Found) -> dict[str, StoredWeight]:
    """Returns the source of every parameter of a model.

    Raises:
      CheckpointError: a parameter has no source or one of another shape, or a tensor has no use.
      UnsupportedModel: a tensor has an element type that is not read.
    """
    parameters = decoder_parameters(spec)
    own = {name: p for name, p in parameters.items() if p.tied_to is None}
    missing = own.keys() - found.keys()
    if missing:
        hint = ""
        if LM_HEAD in missing:
            hint = "; the config says that embedding and head are not tied"
        raise CheckpointError(f"{where} lacks {_some(missing)}{hint}")
    unused = found.keys() - own.keys()
    if unused:
        raise CheckpointError(
            f"{where} holds {_some(unused)}, which the model that its config describes does not "
            "have; serving it without them would be wrong"
        )
    for name, parameter in own.items():
        _check(where, name, parameter.shape, found[name])
    return {name: found[p.tied_to or name] for name, p in parameters.items()}


def _check(where: object, name: str, shape: tuple[int, ...], source: StoredWeight) -> None:
    if source.shape != shape:
        raise CheckpointError(
            f"{where}: {name} has shape {source.shape}, the config asks for {shape}; the config "
            "belongs to another checkpoint"
        )
    if source.dtype not in NUMPY_DTYPES:
        raise UnsupportedModel(
            f"{where}: {name} has element type {source.dtype}; supported are "
            f"{', '.join(NUMPY_DTYPES)} (quantised models are served from GGUF)"
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{', '.join(listed[:_SHOWN])}{more}"
