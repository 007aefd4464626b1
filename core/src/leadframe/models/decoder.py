"""The step of every dense pre-norm decoder, written once for every array library.

Only ops, `+ - * /`, slicing and `.reshape` touch an array here; a test reads the syntax tree.
Head counts come from array shapes, so the same code runs on a whole model and on one rank's
share of it. A new layer topology is a new file; a new brand is not.

Shapes: T tokens, E hidden size, H query heads, K KV heads, D head dim, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadframe.models.spec import (
    EMBED,
    EMBED_SCALE,
    FINAL_NORM,
    LM_HEAD,
    DecoderSpec,
    LayerSpec,
    rope_name,
)
from leadframe.platform.backend import KV, Array, KVLayer
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops, RopeTable

Weights = Mapping[str, Array]
LayerNames = Sequence[tuple[str, str]]
"""(name inside the layer, name in the whole model) of each weight of a layer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one step shares."""

    ops: Ops
    spec: DecoderSpec
    num_tokens: int
    ropes: Sequence[RopeTable]
    plans: Mapping[AttnParams, Any]

    def norm(self, x: Array, weight: Array) -> Array:
        return self.ops.rms_norm(x, weight, self.spec.norm_eps, self.spec.norm_offset)

    def add_norm(self, x: Array, residual: Array, weight: Array) -> tuple[Array, Array]:
        spec = self.spec
        return self.ops.add_rms_norm(x, residual, weight, spec.norm_eps, spec.norm_offset)

    def heads(self, x: Array) -> Array:
        return x.reshape(self.num_tokens, -1, self.spec.head_dim)


def forward(
    ops: Ops,
    spec: DecoderSpec,
    layer_names: Sequence[LayerNames],
    weights: Weights,
    kv: KV,
    arrays: StepArrays,
) -> tuple[Array, KV]:
    """Runs every layer over the tokens of a batch.

    Returns:
      The final hidden states [T, E], after the last norm, and the new KV.
    """
    step = _begin(ops, spec, weights, arrays)
    residual = ops.embed(weights[EMBED], arrays.token_ids)
    if spec.embed_scale is not None:
        residual = residual * weights[EMBED_SCALE]
    new_kv: KV = []
    x = None
    for layer, names, kv_layer in zip(spec.layers, layer_names, kv, strict=True):
        local = {name: weights[full_name] for name, full_name in names}
        x, residual, updated = _layer(step, layer, local, x, residual, kv_layer)
        new_kv.append(updated)
    hidden, _ = step.add_norm(x, residual, weights[FINAL_NORM])
    return hidden, new_kv


def logits(ops: Ops, spec: DecoderSpec, weights: Weights, rows: Array) -> Array:
    """Returns the logits [N, V] of hidden rows [N, E]."""
    out = ops.linear(rows, weights[LM_HEAD])
    if spec.final_softcap is not None:
        out = ops.softcap(out, spec.final_softcap)
    return ops.all_gather(out)


def _begin(ops: Ops, spec: DecoderSpec, weights: Weights, arrays: StepArrays) -> _Step:
    ropes = [
        ops.rope_table(arrays.positions, weights[rope_name(index)], rope.scaling)
        for index, rope in enumerate(spec.ropes)
    ]
    plans: dict[AttnParams, Any] = {}
    for layer in spec.layers:
        if layer.attn not in plans:
            plans[layer.attn] = ops.plan(arrays, layer.attn)
    return _Step(ops, spec, arrays.bucket.num_tokens, ropes, plans)


def _layer(
    step: _Step, layer: LayerSpec, w: Weights, x: Array, residual: Array, kv: KVLayer
) -> tuple[Array, Array, KVLayer]:
    """One layer; `x` [T, E] is what the layer before adds to `residual`, None for the first."""
    if x is None:
        hidden = step.norm(residual, w["input_layernorm.weight"])
    else:
        hidden, residual = step.add_norm(x, residual, w["input_layernorm.weight"])
    x, kv = _attention(step, layer, w, hidden, kv)
    before_mlp = "post_attention_layernorm.weight"
    if step.spec.sandwich_norms:
        x = step.norm(x, w["post_attention_layernorm.weight"])
        before_mlp = "pre_feedforward_layernorm.weight"
    hidden, residual = step.add_norm(x, residual, w[before_mlp])
    x = _mlp(step, w, hidden)
    if step.spec.sandwich_norms:
        x = step.norm(x, w["post_feedforward_layernorm.weight"])
    return x, residual, kv


def _attention(
    step: _Step, layer: LayerSpec, w: Weights, x: Array, kv: KVLayer
) -> tuple[Array, KVLayer]:
    q = step.heads(_linear(step, w, x, "self_attn.q_proj"))
    k = step.heads(_linear(step, w, x, "self_attn.k_proj"))
    v = step.heads(_linear(step, w, x, "self_attn.v_proj"))
    if step.spec.qk_norm:
        q = step.norm(q, w["self_attn.q_norm.weight"])
        k = step.norm(k, w["self_attn.k_norm.weight"])
    if layer.rope is not None:
        q = step.ops.rope(q, step.ropes[layer.rope])
        k = step.ops.rope(k, step.ropes[layer.rope])
    plan = step.plans[layer.attn]
    kv = step.ops.kv_append(kv, k, v, plan)
    out = step.ops.attention(q, kv, plan, layer.attn)
    return _row_linear(step, w, out.reshape(step.num_tokens, -1), "self_attn.o_proj"), kv


def _mlp(step: _Step, w: Weights, x: Array) -> Array:
    gated = step.ops.gelu_mul if step.spec.activation == "gelu" else step.ops.silu_mul
    hidden = gated(_linear(step, w, x, "mlp.gate_proj"), _linear(step, w, x, "mlp.up_proj"))
    return _row_linear(step, w, hidden, "mlp.down_proj")


def _linear(step: _Step, w: Weights, x: Array, name: str) -> Array:
    return step.ops.linear(x, w[name + ".weight"], w.get(name + ".bias"))


def _row_linear(step: _Step, w: Weights, x: Array, name: str) -> Array:
    """A projection whose inputs the ranks share; its bias must be added once, after the sum."""
    out = step.ops.all_reduce(step.ops.linear(x, w[name + ".weight"]))
    bias = w.get(name + ".bias")
    return out if bias is None else out + bias
