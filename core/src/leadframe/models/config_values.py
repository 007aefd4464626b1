"""What kind of value each field of a Hugging Face config holds.

Looked at before Transformers' classes see the file, so that a damaged value is an error that
names its field. Whether a sound value is served is decided where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from leadframe.errors import UnsupportedModel, shown
from leadframe.models.spec import LIMITS

SMALLEST: Final = 1e-30
LARGEST: Final = 1e30
"""Numbers between these two, and their reciprocals, are normal float32 values."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of value.

    Attributes:
      rule: what it must be, for the message.
      holds: whether a value is of this kind.
      nullable: whether null stands for "not set".
    """

    rule: str
    holds: Callable[[Any], bool]
    nullable: bool = True


def is_integer(value: object) -> bool:
    """Whether a value is an integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Whether a value is a number above 0 that a float32 can hold; NaN never is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return SMALLEST <= value <= LARGEST


def _is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _are_positive(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_positive, value))


_DTYPE_NAME: Final = re.compile(r"auto|(torch\.)?b?float\d+\w*")


def _size(limit: int, nullable: bool = True) -> _Kind:
    return _Kind(
        f"an integer in [1, {limit}]", lambda v: is_integer(v) and 1 <= v <= limit, nullable
    )


_LENGTH = _size(LIMITS["max_position_embeddings"])
_COMPUTED = ("num_key_value_heads", "head_dim")
"""Sizes that follow from others where they are null."""
_COUNT = _Kind("an integer of at least 0", _is_count)
_POSITIVE = _Kind("a positive number", is_positive)
_NUMBER = _Kind("a number of at least 0", lambda v: v == 0 or is_positive(v))
_POSITIVES = _Kind("a list of positive numbers", _are_positive)
_FLAG = _Kind("true or false", lambda v: isinstance(v, bool))
_TEXT = _Kind("a string", lambda v: isinstance(v, str))
_DTYPE = _Kind(
    'the name of a dtype, such as "bfloat16"',
    lambda v: isinstance(v, str) and _DTYPE_NAME.fullmatch(v) is not None,
)
_TEXTS = _Kind("a list of strings", lambda v: isinstance(v, list) and all(map(_TEXT.holds, v)))
_COUNTS = _Kind("a list of integers", lambda v: isinstance(v, list) and all(map(_is_count, v)))
_OBJECT = _Kind("an object", lambda v: isinstance(v, dict))
_IDS = _Kind("a token id, or a list of them", lambda v: is_integer(v) or _are_ids(v))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_integer, value))


FIELDS: Final[Mapping[str, _Kind]] = {
    **{name: _size(limit, name in _COMPUTED) for name, limit in LIMITS.items()},
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "original_max_position_embeddings": _LENGTH,
    "rms_norm_eps": _Kind("a number in (0, 1)", lambda v: is_positive(v) and v < 1, False),
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "sliding_window": _COUNT,
    "use_sliding_window": _FLAG,
    "max_window_layers": _COUNT,
    "sliding_window_pattern": _COUNT,
    "layer_types": _TEXTS,
    "query_pre_attn_scalar": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "rope_theta": _POSITIVE,
    "rope_local_base_freq": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
    "no_rope_layers": _COUNTS,
    "no_rope_layer_interval": _LENGTH,
    "eos_token_id": _IDS,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "quantization_config": _OBJECT,
    "num_labels": _size(2**20, nullable=False),  # config classes make a list of this length
}
"""Every field that is used, and how it must look."""

ROPE: Final[Mapping[str, _Kind]] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "original_max_position_embeddings": _LENGTH,
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": _NUMBER,
    "mscale_all_dim": _NUMBER,
    "truncate": _FLAG,
    "short_factor": _POSITIVES,
    "long_factor": _POSITIVES,
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
}
"""The same for what stands in `rope_parameters` or `rope_scaling`, flat or by layer type."""

GENERATION: Final[Mapping[str, _Kind]] = {
    "eos_token_id": _IDS,
    "do_sample": _FLAG,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _Kind("an integer", is_integer),
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
}
"""The same for `generation_config.json`."""


def check_values(
    values: Mapping[str, Any], kinds: Mapping[str, _Kind], where: object, prefix: str = ""
) -> None:
    """Checks every field that is there and known.

    Args:
      values: a JSON object.
      kinds: what its fields must be.
      where: the file, for the message.
      prefix: goes before the names in messages.

    Raises:
      UnsupportedModel: a value is of another kind.
    """
    for name, kind in kinds.items():
        if name not in values:
            continue
        value = values[name]
        if not (kind.nullable if value is None else kind.holds(value)):
            what = f"{prefix}{name} is {shown(value)}"
            raise UnsupportedModel(f"{where}: {what}; it must be {kind.rule}")


def check_config(raw: Mapping[str, Any], where: object) -> None:
    """Checks the fields of a language model's config, the nested ones of the rope included.

    Raises:
      UnsupportedModel: a value is not of the kind that its field holds.
    """
    check_values(raw, FIELDS, where)
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        check_values(rope, ROPE, where, f"{name}.")
        for kind, nested in rope.items():
            if isinstance(nested, dict):
                check_values(nested, ROPE, where, f"{name}.{kind}.")
