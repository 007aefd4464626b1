"""Rotary frequencies of every supported kind, as Transformers computes them.

Some kinds depend on the length of the sequence. A cache that is shared by requests of every
length cannot follow that, so the frequencies here are those of one fixed `context`: the longest
sequence that the engine will serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from leadframe.errors import UnsupportedModel
from leadframe.models.config_values import is_positive
from leadframe.models.spec import RopeSpec

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeContext:
    """What the frequencies depend on besides the rope parameters.

    Attributes:
      head_dim: elements a head.
      max_position_embeddings: the config's value.
      context: longest sequence that will be served.
    """

    head_dim: int
    max_position_embeddings: int
    context: int


_KEYS: Final = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}
_MAX_DIMENSIONS: Final = 4096
_ALWAYS: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_spec(params: Mapping[str, Any], where: RopeContext) -> RopeSpec:
    """Computes frequencies from standardised rope parameters.

    Args:
      params: `rope_type`, `rope_theta` and what the type needs, under Transformers' names.
      where: head dim and lengths.

    Raises:
      UnsupportedModel: an unknown type, or a parameter that the type does not have.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _KEYS:
        raise UnsupportedModel(f"rope_type is {kind!r}; supported are {', '.join(_KEYS)}")
    allowed = {*_ALWAYS, *_KEYS[kind]}
    if kind == "default":  # a config may keep keys of a scaling that it switched off
        allowed |= {"original_max_position_embeddings", "factor"}
    unknown = sorted(k for k, v in params.items() if k not in allowed and v is not None)
    if unknown:
        raise UnsupportedModel(
            f"rope parameters {', '.join(unknown)} are not known for rope_type {kind!r}; "
            "serving the model without them would be wrong"
        )
    with np.errstate(all="ignore"):  # what became infinite or NaN is refused below
        inv_freq, scaling = _COMPUTE[kind](_Params(kind, params, where), where)
    if not (np.isfinite(inv_freq).all() and math.isfinite(scaling)):
        raise UnsupportedModel(
            f"rope parameters {str(dict(params))[:300]} give frequencies that are not finite; "
            "correct them in the model's config"
        )
    return RopeSpec(tuple(inv_freq.astype(np.float32).tolist()), float(scaling))


def served_context(params: Mapping[str, Any], max_position: int, wanted: int | None) -> int:
    """Returns the longest sequence that one set of frequencies serves.

    Kinds whose frequencies change once a sequence outgrows a length are served up to that
    length, where they are exact, unless more is wanted.

    Args:
      params: standardised rope parameters.
      max_position: the config's `max_position_embeddings`.
      wanted: the sequence length that the user asked for; None for what the model gives.
    """
    kind = params.get("rope_type") or params.get("type")
    if kind == "longrope":
        original = int(params.get("original_max_position_embeddings") or max_position)
        return max_position if wanted is not None and wanted > original else original
    if kind == "dynamic":
        return max(max_position, wanted or 0)
    return max_position


class _Params:
    """Rope parameters with errors that name the missing one."""

    def __init__(self, kind: str, params: Mapping[str, Any], where: RopeContext) -> None:
        self._kind, self._params = kind, params
        self.dim = int(where.head_dim * (params.get("partial_rotary_factor") or 1.0))
        if not 2 <= self.dim <= _MAX_DIMENSIONS or self.dim % 2:
            raise UnsupportedModel(
                f"{self.dim} dimensions of a head are rotated; it must be an even number of at "
                f"most {_MAX_DIMENSIONS}"
            )
        self.theta = self.number("rope_theta")

    def number(self, name: str) -> float:
        """Returns a parameter that must be there."""
        value = self._params.get(name)
        if not is_positive(value):
            raise UnsupportedModel(
                f"rope_type {self._kind!r} has {name} = {value!r}; it must be a positive number"
            )
        return float(cast("float", value))

    def get(self, name: str) -> Any:
        """Returns a parameter, or None."""
        return self._params.get(name)

    def powers(self) -> npt.NDArray[np.float32]:
        """Returns theta ** (2i / R), float32 [R/2]; rounded where Transformers rounds."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        return np.power(np.float64(self.theta), exponents.astype(np.float64)).astype(np.float32)


def _default(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    return np.float32(1.0) / params.powers(), 1.0


def _linear(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    return np.float32(1.0) / params.powers() / np.float32(params.number("factor")), 1.0


def _dynamic(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    factor, original = params.number("factor"), where.max_position_embeddings
    length = max(where.context, original)
    growth = factor * length / original - (factor - 1)
    params.theta *= growth ** (params.dim / (params.dim - 2))
    return _default(params, where)


def _llama3(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    factor = params.number("factor")
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    original = params.number("original_max_position_embeddings")
    inv_freq, _ = _default(params, where)
    turns = np.float32(original) * inv_freq / np.float32(2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - smooth) * inv_freq / np.float32(factor) + smooth * inv_freq, 1.0


def _yarn(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    original = params.number("original_max_position_embeddings")
    factor = params.get("factor") or where.max_position_embeddings / original
    powers = params.powers()
    extrapolated, interpolated = 1 / powers, 1 / (np.float32(factor) * powers)
    low, high = _yarn_range(params, original)
    ramp = (np.arange(params.dim // 2, dtype=np.float32) - low) / (high - low)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    inv_freq = interpolated * (1 - keep) + extrapolated * keep
    return inv_freq, _yarn_attention_factor(params, factor)


def _yarn_range(params: _Params, original: float) -> tuple[float, float]:
    """The pairs of dimensions between which frequencies go from kept to interpolated."""

    def pair(turns: float) -> float:
        scale = 2 * math.log(params.theta)
        return params.dim * math.log(original / (turns * 2 * math.pi)) / scale

    low, high = pair(params.get("beta_fast") or 32), pair(params.get("beta_slow") or 1)
    if params.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(params: _Params, factor: float) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params.get("attention_factor"))
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params.get("mscale")) / mscale(params.get("mscale_all_dim"))
    return mscale()


def _longrope(params: _Params, where: RopeContext) -> tuple[Frequencies, float]:
    original = params.number("original_max_position_embeddings")
    name = "long_factor" if where.context > original else "short_factor"
    factors = np.asarray(params.get(name) or (), dtype=np.float32)
    if factors.shape != (params.dim // 2,):
        raise UnsupportedModel(
            f"longrope {name} has {factors.size} entries; a rotation of {params.dim} dimensions "
            f"needs {params.dim // 2}"
        )
    factor = params.get("factor") or where.max_position_embeddings / original
    scaling = params.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return np.float32(1.0) / (factors * params.powers()), scaling


_COMPUTE: Final[dict[str, Callable[[_Params, RopeContext], tuple[Frequencies, float]]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
