"""A seeded two-layer decoder and a driver of its own: the engine's promises without the engine.

The driver schedules by hand, so that a case can choose chunk sizes, batch mixes, preemption and
shared prefixes, and ask that a request's tokens do not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.batches import BatchSpec, Padding, Row, bucket_of, make_batch
from leadframe.conformance.kit import ORACLE, Kit
from leadframe.platform import (
    KV,
    Array,
    AttnParams,
    Bucket,
    CompiledStep,
    KVLayerSpec,
    KVSpec,
    Ops,
    OpSpec,
    Partition,
    StepArrays,
)

Weights = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Sizes of the model; weights are drawn from the seed."""

    vocab: int = 160
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    layers: int = 2
    window: int | None = None
    softcap: float | None = None

    @property
    def params(self) -> AttnParams:
        """Attention constants."""
        return AttnParams.of(self.dim**-0.5, self.window, self.softcap)

    def weights(self, seed: int) -> dict[str, npt.NDArray[np.float32]]:
        """Draws the weights."""
        rng = np.random.default_rng(seed)
        inner, kv = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {"embed": (self.vocab, self.hidden), "head": (self.vocab, self.hidden)}
        for i in range(self.layers):
            shapes |= {
                f"{i}.q": (inner, self.hidden),
                f"{i}.k": (kv, self.hidden),
                f"{i}.v": (kv, self.hidden),
                f"{i}.o": (self.hidden, inner),
                f"{i}.gate": (2 * self.hidden, self.hidden),
                f"{i}.up": (2 * self.hidden, self.hidden),
                f"{i}.down": (self.hidden, 2 * self.hidden),
            }
        out = {n: rng.standard_normal(s) / np.sqrt(s[-1]) * 1.5 for n, s in shapes.items()}
        out["embed"] = rng.standard_normal((self.vocab, self.hidden))
        for i in range(self.layers):
            out |= {f"{i}.norm1": np.ones(self.hidden), f"{i}.norm2": np.ones(self.hidden)}
        out["norm"] = np.ones(self.hidden)
        out["inv_freq"] = 1000.0 ** -(np.arange(self.dim // 2) / (self.dim // 2))
        return {name: value.astype(np.float32) for name, value in out.items()}

    def partition(self, name: str) -> Partition | None:
        """How ranks share a weight."""
        kind = name.rpartition(".")[2]
        if kind in ("embed", "head", "gate", "up"):
            return Partition(0)
        if kind in "qkvo":
            heads = self.kv_heads if kind in "kv" else self.heads
            return Partition(int(kind == "o"), heads, self.dim)
        return Partition(1) if kind == "down" else None

    def forward(self, ops: Ops, w: Weights, kv: KV, arrays: StepArrays) -> tuple[Array, KV]:
        """Logits [L, V] of the rows in `logits_idx`."""
        plan = ops.plan(arrays, self.params)
        x = ops.embed(w["embed"], arrays.token_ids)
        rope = ops.rope_table(arrays.positions, w["inv_freq"])
        layers = []
        for i in range(self.layers):
            h = ops.rms_norm(x, w[f"{i}.norm1"], 1e-5)
            q, k, v = (self._heads(ops.linear(h, w[f"{i}.{n}"])) for n in "qkv")
            layer = ops.kv_append(kv[i], ops.rope(k, rope), v, plan)
            out = ops.attention(ops.rope(q, rope), layer, plan, self.params)
            out = out.reshape((out.shape[0], -1))
            x = x + ops.all_reduce(ops.linear(out, w[f"{i}.o"]))
            h = ops.rms_norm(x, w[f"{i}.norm2"], 1e-5)
            h = ops.silu_mul(ops.linear(h, w[f"{i}.gate"]), ops.linear(h, w[f"{i}.up"]))
            x = x + ops.all_reduce(ops.linear(h, w[f"{i}.down"]))
            layers.append(layer)
        rows = ops.take_rows(ops.rms_norm(x, w["norm"], 1e-5), arrays.logits_idx)
        return ops.all_gather(ops.linear(rows, w["head"])), layers

    def _heads(self, x: Array) -> Array:
        return x.reshape((x.shape[0], -1, self.dim))


@dataclass(slots=True)
class Stream:
    """One token stream of the driver."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[npt.NDArray[Any]] = field(default_factory=list)


class Driver:
    """Runs sequences of a tiny model through compiled steps.

    Args:
      kit: the backend.
      model: the model.
      dtype: of weights, activations and KV.
      capture: whether steps are captured.
      num_blocks: size of the pool.
    """

    def __init__(
        self,
        kit: Kit,
        model: TinyModel,
        dtype: str | None = None,
        capture: bool = False,
        num_blocks: int = 40,
    ) -> None:
        self.kit, self.model, self.capture = kit, model, capture
        caps = kit.backend.caps
        self.dtype = dtype or next(d for d in caps.compute_dtypes if d in caps.kv_dtypes)
        self.block_size = min(caps.block_sizes, key=lambda size: abs(size - 16))
        layers = (KVLayerSpec(model.kv_heads, model.dim),) * model.layers
        self.kv = kit.backend.kv_alloc(KVSpec(layers, self.block_size, self.dtype), num_blocks)
        host = model.weights(kit.seed + 1)
        self.weights = {
            name: kit.backend.upload(
                value, None if name == "inv_freq" else self.dtype, model.partition(name)
            )
            for name, value in host.items()
        }
        self.free = list(range(num_blocks - 1, 0, -1))
        self.steps: dict[Bucket, CompiledStep] = {}

    def step(self, work: Sequence[tuple[Stream, int]], padding: Padding | None = None) -> None:
        """Computes `count` further tokens of each sequence; decodes must come first.

        Appends the logits that follow the last of them, and the greedy token when every known
        token has been computed.
        """
        spec = self._spec(work, padding or Padding())
        batch = make_batch(spec)
        compiled = self._compiled(batch.bucket, batch)
        outputs, self.kv = compiled.run(batch, self.kv)
        logits = self.kit.get(outputs["logits"])
        offset = spec.padding.decodes
        for i, (sequence, count) in enumerate(work):
            sequence.computed += count
            row = i + (offset if i >= spec.num_decodes else 0)
            if sequence.computed == len(sequence.tokens):
                sequence.logits.append(logits[row].astype(np.float64))
                sequence.tokens.append(int(np.argmax(logits[row])))

    def _spec(self, work: Sequence[tuple[Stream, int]], padding: Padding) -> BatchSpec:
        rows, ids = [], []
        for sequence, count in work:
            end = sequence.computed + count
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            rows.append(Row(count, end, tuple(sequence.blocks)))
            ids += sequence.tokens[sequence.computed : end]
        num_decodes = 0
        while num_decodes < len(rows) and rows[num_decodes].num_tokens == 1:
            num_decodes += 1
        spec = BatchSpec(tuple(rows), self.block_size, num_decodes, padding)
        ends = np.cumsum([row.num_tokens for row in rows]) - 1
        last = [
            int(end) + (padding.decodes if i >= num_decodes else 0) for i, end in enumerate(ends)
        ]
        extra = {"token_ids": np.array(ids, np.int32), "logits_idx": np.array(last, np.int32)}
        seqs = bucket_of(spec).num_seqs
        return replace(spec, extra=extra, bucket={"num_logits": seqs, "sample": "greedy"})

    def _compiled(self, bucket: Bucket, batch: Any) -> CompiledStep:
        if bucket not in self.steps:
            features = self.model.params.features
            spec = OpSpec("attention", self.dtype, self.dtype, self.model.dim, features=features)
            ops = self.kit.ops_for(spec)

            def step(w: Weights, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
                logits, kv = self.model.forward(ops, w, kv_d, arrays)
                return {"logits": logits}, kv

            self.steps[bucket] = self.kit.compile(step, batch, self.weights, self.kv, self.capture)
        return self.steps[bucket]

    def release(self, sequence: Stream) -> None:
        """Takes all blocks of a sequence: what preemption does."""
        self.free.extend(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def generate(self, prompt: Sequence[int], count: int, chunk: int = 10**6) -> Stream:
        """Runs one sequence alone."""
        sequence = Stream(list(prompt))
        while len(sequence.tokens) < len(prompt) + count:
            self.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
        return sequence

    def close(self) -> None:
        """Frees the pool and the steps."""
        for compiled in self.steps.values():
            compiled.close()
        self.kit.backend.kv_free(self.kv)


class _OracleOps:
    def __init__(self) -> None:
        for name, function in ORACLE.items():
            setattr(self, name, function)


def oracle_logits(kit: Kit, driver: Driver, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Float64 logits [n, V] after every token, from the weights as the backend holds them."""
    model, count = driver.model, len(tokens)
    size = driver.block_size
    num = -(-count // size)
    blocks = tuple(range(1, num + 1))
    spec = BatchSpec(
        (Row(count, count, blocks),),
        size,
        0,
        Padding(),
        {"token_ids": np.array(tokens, np.int32), "logits_idx": np.arange(count, dtype=np.int32)},
        {"num_logits": count, "sample": "greedy"},
    )
    batch = make_batch(spec)
    from leadframe.platform import unpack

    arrays = unpack(batch.bucket, batch.ints, batch.floats)
    weights = {n: kit.get(a).astype(np.float64) for n, a in driver.weights.items()}
    kv = [np.zeros((num + 1, size, 2 * model.kv_heads, model.dim)) for _ in range(model.layers)]
    logits, _ = model.forward(_OracleOps(), weights, kv, arrays)  # type: ignore[arg-type]
    return np.asarray(logits)


__all__ = ["Driver", "Stream", "TinyModel", "oracle_logits"]
