"""Runs an architecture that has no native model file: Transformers' own model, our paged attention.

The facts about a model are not read from its config but from one pass over a model without memory:
each attention layer calls us, and what it asks for is what it needs. Whatever a layer asks that
paged attention does not do is an error then, before a weight is read.

Transformers looks attention functions up by name in a registry of the process. Ours is entered
there when a model is opened, never on import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from leadframe.errors import UnsupportedModel
from leadframe.platform.backend import KV, Array, KVLayerSpec, WeightRole
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops

ATTENTION_NAME: Final = "leadframe"
_STEP: Final = "leadframe_step"
"""The keyword by which a step reaches every attention layer."""

_UNDERSTOOD: Final = frozenset(
    {_STEP, "position_ids", "use_cache", "cache_position", "sliding_window", "softcap"}
)


class WeightTaker(Protocol):
    """What a model needs of the backend that runs it."""

    device: torch.device

    def upload(
        self, source: Any, dtype: str | None = None, *, role: WeightRole = "tensor"
    ) -> Array:
        """Copies a host array to the device."""


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


@dataclass(slots=True)
class _Probe:
    """Stands in for a step, and notes what the layers ask."""

    layers: dict[int, LayerFacts] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams) -> Tensor:
        if k.shape[-1] != v.shape[-1]:
            raise UnsupportedModel(
                f"layer {layer} has keys of {k.shape[-1]} and values of {v.shape[-1]} dimensions; "
                "the KV cache needs them equal"
            )
        kv = KVLayerSpec(k.shape[1], k.shape[-1])
        self.layers[layer] = LayerFacts(q.shape[1], kv, attn)
        return q.transpose(1, 2)


@dataclass(slots=True)
class _Step:
    """One step as the attention layers see it."""

    ops: Ops
    arrays: StepArrays
    kv: KV
    plans: dict[AttnParams, Any] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams) -> Tensor:
        if attn not in self.plans:
            self.plans[attn] = self.ops.plan(self.arrays, attn)
        plan = self.plans[attn]
        q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # [T, heads, D]
        self.kv[layer] = self.ops.kv_append(self.kv[layer], k, v, plan)
        out: Tensor = self.ops.attention(q, self.kv[layer], plan, attn)
        return out.unsqueeze(0)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls instead of its own attention: q, k, v are [1, heads, T, D]."""
    step = asked.get(_STEP)
    if step is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass keywords to its attention")
    unknown = [name for name, value in asked.items() if value is not None and value is not False]
    unknown = sorted(set(unknown) - _UNDERSTOOD)
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        what = ", ".join(unknown) or "attention that is not causal, or has a mask of its own"
        raise UnsupportedModel(f"{type(module).__name__} asks for {what}: not implemented")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attn = AttnParams.of(scale, asked.get("sliding_window"), asked.get("softcap"))
    return step.attend(module.layer_idx, query, key, value, attn), None


class TransformersModel:
    """A causal language model of Transformers as the runner sees it.

    Args:
      path: a Hugging Face directory with safetensors.

    Attributes:
      config: the model's config.
      layers: what each layer's attention needs, in order.
      num_parameters: elements of all weights.

    Raises:
      UnsupportedModel: Transformers does not know the architecture, or it needs something that
        paged attention does not do.
    """

    def __init__(self, path: Path) -> None:
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        transformers.AttentionInterface.register(ATTENTION_NAME, _attention)
        self._path = path
        self.config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            model = auto.from_config(
                self.config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
        self.layers: Sequence[LayerFacts] = _probe(model)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self._model: Any = None
        self._base: Any = None
        self._head = _Given()
        self._linears = _Linears()

    def load(self, backend: WeightTaker, dtype: str) -> None:
        """Reads the weights onto a device."""
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self._path,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._linears.replace_in(model, backend, dtype)
        self._model = model.to(backend.device).eval()
        prefix = model.base_model_prefix
        self._base = getattr(model, prefix)
        # the model's own head then runs on rows that we give it, with whatever it does to logits
        setattr(model, prefix, self._head)

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""
        step = _Step(ops, arrays, list(kv))
        with self._linears.over(ops):
            hidden = self._base(
                input_ids=arrays.token_ids.long().unsqueeze(0),
                position_ids=arrays.positions.long().unsqueeze(0),
                use_cache=False,
                **{_STEP: step},
            ).last_hidden_state
        return hidden[0], step.kv

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""
        self._head.hidden = rows.unsqueeze(0)
        ids = torch.zeros((1, rows.shape[0]), dtype=torch.int64, device=rows.device)
        with self._linears.over(ops):
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0]


def _probe(model: Any) -> list[LayerFacts]:
    """Runs a model without memory, to learn what its attention layers need."""
    probe = _Probe()
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    with torch.no_grad():
        model(input_ids=ids, position_ids=ids, use_cache=False, **{_STEP: probe})
    name = type(model).__name__
    if sorted(probe.layers) != list(range(len(probe.layers))) or not probe.layers:
        raise UnsupportedModel(
            f"{name} does not use Transformers' attention interface in every layer; it needs a "
            "native model file"
        )
    return [probe.layers[index] for index in range(len(probe.layers))]


class _Given(nn.Module):
    """Takes the place of the base model below the head: returns what it was given."""

    hidden: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the hidden states that were set before."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class _Linears:
    """The linear layers of a model, running on the op table of the step in progress."""

    def __init__(self) -> None:
        self._ops: Ops | None = None

    def replace_in(self, model: nn.Module, backend: WeightTaker, dtype: str) -> None:
        """Replaces every plain linear layer, whose weights the backend may pack."""
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, _OpLinear(child, backend, dtype, self._current))

    def over(self, ops: Ops) -> _Linears:
        """Names the op table for the `with` block that follows."""
        self._ops = ops
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._ops = None

    def _current(self) -> Ops:
        assert self._ops is not None, "a linear layer ran outside a step"
        return self._ops


class _OpLinear(nn.Module):
    """A linear layer through `ops.linear`."""

    def __init__(
        self, layer: nn.Linear, backend: WeightTaker, dtype: str, ops: Callable[[], Ops]
    ) -> None:
        super().__init__()
        host = layer.weight.detach().float().numpy()
        self._packed = backend.upload(host, dtype, role="linear")
        self._ops = ops
        bias = None if layer.bias is None else layer.bias.detach().to(backend.device)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., in] to [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = self._ops().linear(flat, self._packed, self.bias)
        return out.reshape(*x.shape[:-1], -1)
