"""Steps to compile: a decoder of a given shape, and the buckets that stand for all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from leadframe.platform.backend import KV, Array, KVLayerSpec, KVSpec, Partition, WeightRole
from leadframe.platform.batch import Bucket, SampleVariant, StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops

BLOCK_SIZE: Final = 32

BUCKETS: Final[Mapping[str, Bucket]] = {
    "decode": Bucket(64, 64, 64, num_blocks=128, num_logits=64),
    "mixed": Bucket(128, 32, 0, num_blocks=128, num_logits=32),
}
"""A decode step and a mixed step, greedy."""

WAYS: Final[tuple[SampleVariant, ...]] = ("greedy", "plain", "threshold")
"""The ways to sample that a start compiles."""

KERNEL_BUCKETS: Final[Mapping[str, Bucket]] = {
    "decode": Bucket(32, 32, 32, num_blocks=64, num_logits=0, sample="skip"),
    "mixed": Bucket(64, 16, 0, num_blocks=64, num_logits=0, sample="skip"),
}
"""The same for the kernels alone: their code does not depend on these sizes."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight to compile against.

    Attributes:
      shape: of the whole weight.
      partition: how ranks share it.
      dtype: element type; None is the step's.
      role: as in `Backend.upload`.
    """

    shape: tuple[int, ...]
    partition: Partition = field(default_factory=Partition)
    dtype: str | None = None
    role: WeightRole = "linear"


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a dense decoder.

    Attributes:
      hidden: E.
      intermediate: width of the MLP.
      heads: query heads.
      kv_heads: KV heads.
      head_dim: D.
      vocab: V.
      layers: layers to compile; each is the same to the compiler.
      window: sliding window of every second layer, if any.
      softcap: soft cap of the scores, if any.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int = 2
    window: int | None = None
    softcap: float | None = None

    def attention(self, layer: int) -> AttnParams:
        """The constants of a layer."""
        window = self.window if layer % 2 == 0 else None
        return AttnParams.of(self.head_dim**-0.5, window, self.softcap)

    def kv_spec(self, dtype: str) -> KVSpec:
        """The KV cache."""
        layers = (KVLayerSpec(self.kv_heads, self.head_dim),) * self.layers
        return KVSpec(layers, BLOCK_SIZE, dtype)

    def weights(self) -> dict[str, Weight]:
        """Every weight by name."""
        vocab = (self.vocab, self.hidden)
        table = {
            "embed": Weight(vocab, Partition(0), role="embed"),
            "head": Weight(vocab, Partition(0)),
            "norm": Weight((self.hidden,)),
            "rope": Weight((self.head_dim // 2,), dtype="float32"),
        }
        layer = self._layer()
        for i in range(self.layers):
            table |= {f"{i}.{name}": weight for name, weight in layer.items()}
        return table

    def _layer(self) -> dict[str, Weight]:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        keys = Weight((kv, self.hidden), Partition(0, self.kv_heads, self.head_dim))
        wide = Weight((self.intermediate, self.hidden), Partition(0))
        return {
            "norm": Weight((self.hidden,)),
            "q": Weight((query, self.hidden), Partition(0, self.heads, self.head_dim)),
            "k": keys,
            "v": keys,
            "o": Weight((self.hidden, query), Partition(1, self.heads, self.head_dim)),
            "mlp_norm": Weight((self.hidden,)),
            "gate": wide,
            "up": wide,
            "down": Weight((self.hidden, self.intermediate), Partition(1)),
        }


SHAPES: Final[Mapping[str, DecoderShape]] = {
    "llama-3-8b": DecoderShape(4096, 14336, 32, 8, 128, 128_256),
    "smollm2-135m": DecoderShape(576, 1536, 9, 3, 64, 49_152),
    "gemma-3-1b": DecoderShape(1152, 6912, 4, 1, 256, 262_144, window=512),
}
"""One for each head dimension that changes how a cache is laid out."""


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """The step of a decoder, as `leadframe.runner` would build it; a `SplitStep`."""

    shape: DecoderShape
    ops: Ops

    def __call__(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Any], KV]:
        """Computes every layer and one token a row."""
        hidden, kv = self.forward(weights, kv_d, arrays)
        return self.head(weights, hidden, arrays), kv

    def forward(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Any], KV]:
        """Computes every layer."""
        ops, kv = self.ops, []
        plans = [ops.plan(arrays, self.shape.attention(i)) for i in range(min(2, len(kv_d)))]
        rope = ops.rope_table(arrays.positions, weights["rope"])
        x = ops.embed(weights["embed"], arrays.token_ids)
        for i, layer in enumerate(kv_d):
            prefix = f"{i}."
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            params = self.shape.attention(i)
            x, layer = self._layer(x, own, layer, (plans[i % 2], params), rope)
            kv.append(layer)
        return {"hidden": ops.rms_norm(x, weights["norm"], 1e-5)}, kv

    def head(
        self, weights: Mapping[str, Array], hidden: Mapping[str, Array], arrays: StepArrays
    ) -> dict[str, Any]:
        """Computes logits and one token a row."""
        ops, way = self.ops, arrays.bucket.sample
        rows = ops.take_rows(hidden["hidden"], arrays.logits_idx)
        logits = ops.all_gather(ops.linear(rows, weights["head"]))
        outputs = {"finite": ops.finite_rows(logits)}
        if way == "greedy" or way == "skip":
            return outputs | {"tokens": ops.argmax(logits)}
        draw = (arrays.temperature, arrays.uniform, arrays.min_p, arrays.top_k, arrays.top_p)
        tokens, covered = ops.sample(logits, *draw, way)
        return outputs | {"tokens": tokens, "covered": covered}

    def _layer(
        self,
        x: Array,
        w: Mapping[str, Array],
        layer: Any,
        attention: tuple[Any, AttnParams],
        rope: Any,
    ) -> tuple[Array, Any]:
        ops, tokens, (plan, params) = self.ops, x.shape[0], attention
        hidden = ops.rms_norm(x, w["norm"], 1e-5)
        q, k, v = (
            ops.linear(hidden, w[name]).reshape(tokens, -1, self.shape.head_dim) for name in "qkv"
        )
        layer = ops.kv_append(layer, ops.rope(k, rope), v, plan)
        out = ops.attention(ops.rope(q, rope), layer, plan, params).reshape(tokens, -1)
        x = x + ops.all_reduce(ops.linear(out, w["o"]))
        hidden = ops.rms_norm(x, w["mlp_norm"], 1e-5)
        gated = ops.silu_mul(ops.linear(hidden, w["gate"]), ops.linear(hidden, w["up"]))
        return x + ops.all_reduce(ops.linear(gated, w["down"])), layer


@dataclass(frozen=True, slots=True)
class KernelStep:
    """The kernels alone: queries, keys and values come in the place of weights.

    Attributes:
      head_dims: one layer for each.
      ops: the op table.
    """

    head_dims: tuple[int, ...]
    ops: Ops

    @staticmethod
    def weights(head_dims: tuple[int, ...], bucket: Bucket) -> dict[str, Weight]:
        """What the step reads: four query heads for each of two KV heads."""
        table: dict[str, Weight] = {}
        for dim in head_dims:
            kv = Weight((bucket.num_tokens, 2, dim), role="tensor")
            query = Weight((bucket.num_tokens, 8, dim), role="tensor")
            table |= {f"{dim}.q": query, f"{dim}.k": kv, f"{dim}.v": kv}
        return table

    def __call__(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Any], KV]:
        """Appends and attends."""
        ops, outputs, kv = self.ops, {}, []
        plan = ops.plan(arrays, AttnParams.of(1.0))
        for dim, old in zip(self.head_dims, kv_d, strict=True):
            q, k, v = (weights[f"{dim}.{name}"] for name in "qkv")
            layer = ops.kv_append(old, k, v, plan)
            outputs[f"{dim}"] = ops.attention(q, layer, plan, AttnParams.of(dim**-0.5))
            kv.append(layer)
        return outputs, kv
