"""Our attention inside Transformers' models: what a layer asks for, in a probe and in a step.

Transformers looks attention functions up by name in a registry of the process. Ours are entered
there when a model is opened, never on import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from leadframe.errors import UnsupportedModel
from leadframe.platform.backend import KV, KVLayerSpec
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops
from leadframe_torch.transformers_layers import ATTRIBUTE, InProgress

STEP_ATTENTION: Final = "leadframe"
"""The name under which steps run. No mask is registered for it, so none is ever built."""
PROBE_ATTENTION: Final = "leadframe_probe"
"""The name under which a model is probed, with its masks."""
_UNDERSTOOD: Final = frozenset(
    {"position_ids", "use_cache", "cache_position", "sliding_window", "softcap"}
)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one attention layer asked for.

    Attributes:
      num_heads: query heads.
      kv: its KV cache.
      attn: its constants.
    """

    num_heads: int
    kv: KVLayerSpec
    attn: AttnParams


@dataclass(frozen=True, slots=True)
class ProbeMask:
    """Stands in for a mask, and knows which keys it lets through.

    Attributes:
      sees: `(batch, head, query, key) -> bool`, over tensors of positions.
    """

    sees: Callable[[Any, Any, Tensor, Tensor], Tensor]

    def is_that_of(self, attn: AttnParams, length: int) -> bool:
        """Whether it is causal with just the window of `attn`, in a sequence of `length`."""
        zero = torch.tensor(0)
        for query in {0, 1, length // 2, length - 1}:
            keys = torch.arange(length)
            expected = keys <= query
            if attn.window is not None:
                expected &= keys > query - attn.window
            try:
                seen = self.sees(zero, zero, torch.tensor(query), keys)
            except RuntimeError:  # it looks at more than positions
                return False
            if not torch.equal(seen.broadcast_to(expected.shape), expected):
                return False
        return True


@dataclass(slots=True)
class Probe:
    """Stands in for a step, and notes what the layers ask.

    Attributes:
      ops: runs linear layers without memory.
      length: the longest sequence that will be served.
      layers: by index, what each asked for.
    """

    ops: Ops
    length: int
    layers: dict[int, LayerFacts] = field(default_factory=dict)
    _checked: set[tuple[int, AttnParams]] = field(default_factory=set)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams, mask: object
    ) -> Tensor:
        """Notes a layer and returns something of the right shape."""
        if k.shape[-1] != v.shape[-1]:
            raise UnsupportedModel(
                f"layer {layer} has keys of {k.shape[-1]} and values of {v.shape[-1]} dimensions; "
                "the KV cache needs them equal"
            )
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends more than once in a step")
        self._check_mask(layer, attn, mask)
        kv = KVLayerSpec(k.shape[1], k.shape[-1])
        self.layers[layer] = LayerFacts(q.shape[1], kv, attn)
        return q.transpose(1, 2)

    def _check_mask(self, layer: int, attn: AttnParams, mask: object) -> None:
        if not isinstance(mask, ProbeMask):
            raise UnsupportedModel(f"layer {layer} does not take its mask from Transformers")
        key = id(mask), attn
        if key not in self._checked and not mask.is_that_of(attn, self.length):
            what = "full causal attention" if attn.window is None else f"a window of {attn.window}"
            raise UnsupportedModel(
                f"layer {layer} asks for {what} and has a mask that is something else"
            )
        self._checked.add(key)


@dataclass(slots=True)
class Step:
    """One step as the attention layers see it."""

    ops: Ops
    arrays: StepArrays
    kv: KV
    plans: dict[AttnParams, Any] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams, mask: object
    ) -> Tensor:
        """Appends K and V to a layer's cache and attends over it."""
        if mask is not None:
            raise UnsupportedModel(f"layer {layer} builds a mask of its own")
        if attn not in self.plans:
            self.plans[attn] = self.ops.plan(self.arrays, attn)
        plan = self.plans[attn]
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # [T, heads, D]
        self.kv[layer] = self.ops.kv_append(self.kv[layer], k, v, plan)
        out: Tensor = self.ops.attention(q, self.kv[layer], plan, attn)
        return out.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class HeadStep:
    """The part of a step above the layers: nothing attends there."""

    ops: Ops

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams, mask: object
    ) -> Tensor:
        """Raises."""
        raise UnsupportedModel(f"layer {layer} attends in the model's head")


def register() -> None:
    """Enters our functions into Transformers' registries; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(STEP_ATTENTION, attention)
    AttentionInterface.register(PROBE_ATTENTION, attention)
    AttentionMaskInterface.register(PROBE_ATTENTION, _probe_mask)


def _probe_mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> ProbeMask:
    """What Transformers calls to build a mask while a model is probed."""
    return ProbeMask(mask_function)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls instead of its own attention: q, k, v are [1, heads, T, D]."""
    current: InProgress = getattr(module, ATTRIBUTE)
    unknown = [name for name, value in asked.items() if value is not None and value is not False]
    unknown = sorted(set(unknown) - _UNDERSTOOD)
    if unknown or not getattr(module, "is_causal", True):
        what = ", ".join(unknown) or "attention that is not causal"
        raise UnsupportedModel(f"{type(module).__name__} asks for {what}: not implemented")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attn = AttnParams.of(scale, asked.get("sliding_window"), asked.get("softcap"))
    layer: Any = module.layer_idx
    return current.get().attend(layer, query, key, value, attn, attention_mask), None
