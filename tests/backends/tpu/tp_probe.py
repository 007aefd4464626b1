"""Runs one model on 1, 2 and 4 virtual devices of the host and prints how far they differ.

Run as a script, in a process of its own: JAX splits the host once, before it starts.
"""

from __future__ import annotations

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import numpy as np

from leadframe.conformance.batches import BatchSpec, Padding, Row, make_batch
from leadframe.models.info import GenerationDefaults
from leadframe.models.model import DecoderModel
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec
from leadframe.platform import AttnParams, KVSpec, Limits, build_op_table
from leadframe.runner.step import ModelStep
from leadframe_tpu.create import create_backend
from leadframe_tpu.detect import INTERPRETED

BLOCK = 16
SPEC = DecoderSpec(
    architecture="tiny",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=2,  # on four devices each is stored twice
    head_dim=32,
    layers=(LayerSpec(AttnParams.of(32**-0.5)), LayerSpec(AttnParams.of(32**-0.5, window=9))),
    ropes=(RopeSpec(tuple(10000.0 ** -(np.arange(16) / 16))),),
    max_position_embeddings=128,
    norm_eps=1e-5,
    qkv_bias=True,
    o_bias=True,
    tied=True,
)
# (tokens of the step, tokens of the row, blocks)
ROWS = {
    "prefill": [Row(21, 21, (3, 1)), Row(9, 9, (2,))],
    "decode": [Row(1, 22, (3, 1)), Row(1, 10, (2,))],
}


class CountingSource:
    """A weight that notes the largest part of it that was read at once."""

    dtype = "float32"

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.largest = values, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        part = self._values if index is None else self._values[index]
        self.largest = max(self.largest, part.size)
        return part


def host_weights(model: DecoderModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(p.shape) / np.sqrt(p.shape[-1])).astype(np.float32)
        for name, p in model.parameters.items()
        if p.tied_to is None
    }


def load(backend, model, host) -> tuple[dict, dict[str, float]]:
    """Uploads everything; returns the largest share of each weight that was read at once."""
    weights = {n: backend.upload(v, d or "float32") for n, (v, d) in model.constants.items()}
    shares = {}
    for name, parameter in model.parameters.items():
        if parameter.tied_to is not None:
            weights[name] = weights[parameter.tied_to]
            continue
        source = CountingSource(host[name])
        weights[name] = backend.upload(source, "float32", parameter.partition, parameter.role)
        shares[name] = source.largest / host[name].size
    return weights, shares


def run(num_devices: int) -> dict[str, np.ndarray]:
    limits = Limits(tensor_parallel_size=num_devices)
    backend = create_backend(INTERPRETED, {}, limits)
    model = DecoderModel(SPEC, GenerationDefaults())
    weights, shares = load(backend, model, host_weights(model))
    spec = KVSpec(model.info.kv_layers, BLOCK, "float32")
    kv = backend.kv_alloc(spec, 6)
    step = ModelStep(model, build_op_table(backend))
    found = {"shares": shares, "block_bytes": backend.kv_block_bytes(spec)}
    for name, rows in ROWS.items():
        decodes = len(rows) if name == "decode" else 0
        live = np.random.default_rng(1).integers(0, 256, sum(r.num_tokens for r in rows))
        ends = np.cumsum([r.num_tokens for r in rows]) - 1
        num_rows = len(rows) + (decodes > 0)
        batch = make_batch(
            BatchSpec(
                rows=tuple(rows),
                block_size=BLOCK,
                num_decodes=decodes,
                padding=Padding(decodes=1) if decodes else Padding(tokens=2),
                extra={"token_ids": live.astype(np.int32), "logits_idx": ends.astype(np.int32)},
                bucket={"num_logits": num_rows, "sample": "greedy", "num_logprobs": 5},
            )
        )
        compiled = backend.compile(step, batch.bucket, weights, kv)
        before = kv[0].data
        outputs, kv = compiled.run(batch, kv)
        assert before.is_deleted(), "the KV cache was not donated"
        for key, value in outputs.items():
            found[f"{name}.{key}"] = backend.download(value)[: len(rows)]
    for index, layer in enumerate(kv):
        found[f"kv.{index}"] = backend.kv_read(layer, [1, 2, 3])
    src, dst = np.array([[1, 2], [4, 5]], np.int32)
    found["copied"] = backend.kv_read(backend.ops["kv_copy"](kv[0], src, dst), [4, 5])
    return found


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(np.asarray(a, np.float64) - b).max())


def main() -> None:
    alone = run(1)
    report = {}
    for count in (2, 4):
        found = run(count)
        report[count] = {
            "shares": found.pop("shares"),
            "block_bytes": found.pop("block_bytes") / alone["block_bytes"],
            "errors": {name: difference(value, alone[name]) for name, value in found.items()},
        }
    print(json.dumps(report))


main()
