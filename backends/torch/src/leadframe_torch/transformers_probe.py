"""Describes a Transformers model from one pass over it without memory.

The facts about a model are not read from its config: each attention layer calls us, and what it
asks for is what it needs. Whatever a model does that paged attention over a batch of several
sequences would get wrong is an error here, before a weight is read.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from leadframe.errors import UnsupportedModel
from leadframe.platform.model_impl import ModelFacts
from leadframe_torch.transformers_attention import (
    PROBE_ATTENTION,
    LayerFacts,
    Probe,
)
from leadframe_torch.transformers_layers import (
    GivenHidden,
    InProgress,
    OpLinear,
    replace_linears,
)

_TOKENS: Final = 3
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")
"""Rotary tables that depend on the longest sequence in the batch."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found.

    Attributes:
      facts: for the core.
      has_op_linears: whether its linear layers may run as `ops.linear`; not where the model reads
        their weights itself.
    """

    facts: ModelFacts
    has_op_linears: bool


def probe(config: Any) -> Probed:
    """Builds a model without memory and runs it.

    Raises:
      UnsupportedModel: it needs something that is not there.
    """
    _refuse_state(config)
    length = _check_config(config)
    try:
        return _probe(config, length, op_linears=True)
    except UnsupportedModel:
        raise
    except AttributeError:  # a layer reads the weight of a linear layer
        return _probe(config, length, op_linears=False)


def _probe(config: Any, length: int, *, op_linears: bool) -> Probed:
    model = _build(config)
    name = type(model).__name__
    num_parameters = sum(p.numel() for p in model.parameters())
    try:
        return Probed(_run(model, length, num_parameters, op_linears), op_linears)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}; it needs a native model file") from error
    except Exception as error:  # whatever the model does without memory
        if op_linears and isinstance(error, AttributeError):
            raise
        raise UnsupportedModel(
            f"{name} cannot be run without its weights to see what it needs "
            f"({type(error).__name__}: {str(error)[:300]}); it needs a native model file"
        ) from error


def _refuse_state(config: Any) -> None:
    """Refuses a class that says so itself, before fields that such models lack are missed."""
    import transformers

    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(kind, "_is_stateful", False):
        raise UnsupportedModel(
            f"{kind.__name__}: its layers keep a state beside the KV cache; it needs a native "
            "model file"
        )


def _check_config(config: Any) -> int:
    """Returns the longest sequence."""
    text = config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModel(
            f"the config of model type {config.model_type!r} gives no max_position_embeddings "
            f"({length!r}), so the longest sequence is not known"
        )
    ropes = getattr(text, "rope_parameters", None) or {}
    for params in (ropes, *ropes.values()):
        kind = params.get("rope_type") if isinstance(params, dict) else None
        if kind in _LENGTH_DEPENDENT:
            raise UnsupportedModel(
                f"rope_type {kind!r} rotates by the longest sequence in the batch: a request's "
                "tokens would depend on its neighbours"
            )
    return length


def _build(config: Any) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            # bfloat16 because torch's grouped product takes nothing else without memory
            return auto.from_config(
                config,
                dtype=torch.bfloat16,
                attn_implementation=PROBE_ATTENTION,
                trust_remote_code=False,
            )
    except Exception as error:  # whatever a model class raises about its config
        raise UnsupportedModel(
            f"Transformers cannot build a causal language model of type {config.model_type!r} "
            f"with attention of ours: {str(error)[:300]}"
        ) from error


def _run(model: Any, length: int, num_parameters: int, op_linears: bool) -> ModelFacts:
    current, head = InProgress(), GivenHidden()
    current.attach(model)
    if op_linears:
        replace_linears(model, lambda layer: OpLinear(layer.weight, layer.bias, current))
    base = detach_base(model, head)
    _check_interface(model, base)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    ops: Any = _MetaOps()
    found = Probe(ops, length)
    with torch.no_grad(), current.over(found):
        # a mask is given so that Transformers does not look for packed sequences in positions
        mask = torch.ones_like(ids)
        out = base(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
        head.hidden = hidden = out.last_hidden_state
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    layers = _in_order(found, model.config)
    config = model.config.get_text_config(decoder=True)
    return ModelFacts(
        architecture=type(model).__name__,
        vocab_size=logits.shape[-1],
        hidden_size=hidden.shape[-1],
        max_position_embeddings=length,
        num_heads=layers[0].num_heads,
        kv_layers=tuple(layer.kv for layer in layers),
        attn=tuple(layer.attn for layer in layers),
        num_parameters=num_parameters,
        eos_token_ids=_ids(getattr(config, "eos_token_id", None)),
    )


class _MetaOps:
    """The op that a probe runs."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `ops.linear`."""
        return nn.functional.linear(x, weight, bias)


def detach_base(model: Any, instead: nn.Module) -> Any:
    """Returns the part of a model below its head, and puts something else in its place.

    Raises:
      UnsupportedModel: there is none.
    """
    for name in (model.base_model_prefix, "model"):
        base = model._modules.get(name)
        if base is not None:
            setattr(model, name, instead)
            return base
    raise UnsupportedModel("it does not say which part of it is below the head")


def _check_interface(model: Any, base: Any) -> None:
    if getattr(model, "_is_stateful", False) or getattr(base, "_is_stateful", False):
        raise UnsupportedModel("its layers keep a state beside the KV cache")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedModel("it does not take position_ids")


def _in_order(found: Probe, config: Any) -> list[LayerFacts]:
    wanted = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if sorted(found.layers) != list(range(wanted or 0)) or not found.layers:
        raise UnsupportedModel(
            f"{len(found.layers)} of its {wanted} layers use Transformers' attention interface"
        )
    layers = [found.layers[index] for index in range(len(found.layers))]
    heads = {layer.num_heads for layer in layers}
    if len(heads) > 1:
        raise UnsupportedModel(f"its layers have different numbers of heads: {sorted(heads)}")
    return layers


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
