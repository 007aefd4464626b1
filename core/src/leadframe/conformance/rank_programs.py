"""What every rank of a group does at the kit's word; the results are judged where they are asked.

Inputs are whole arrays: each rank uploads its own part by `Partition`. So the same program runs on
one backend of many that are processes, and on one that drives all devices.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.batches import BatchSpec, Row, make_batch
from leadframe.conformance.groups.b_layers import in_step
from leadframe.conformance.kit import Kit
from leadframe.conformance.tiny_model import Driver, TinyModel
from leadframe.platform import KVLayerSpec, KVSpec, Partition

Fields = Mapping[str, Any]
Host = npt.NDArray[Any]
Arrays = Mapping[str, Host]
Program = Callable[[Kit, Fields, Arrays], Arrays]

REPLAYS = 200


def _named(values: Any) -> dict[str, Host]:
    return {str(i): value for i, value in enumerate(values)}


def exchange(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """For each array, cut along its first axis: sum, join, sum of a slice, and what x is then."""
    parts = {n: kit.backend.upload(x, fields["dtype"], Partition(0)) for n, x in arrays.items()}

    def run(ops: Any, cut: Mapping[str, Any]) -> Any:
        out: list[Any] = []
        for name in arrays:  # a compiler may have sorted the others
            x = cut[name]
            total = ops.all_reduce(x)
            out += [total, ops.all_gather(x), ops.all_reduce(x[..., 1:])]
        return tuple(out)

    return _named(in_step(kit, run, parts))


def embed(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """Rows of a table that is cut by rows of the vocabulary, uploaded in two roles."""
    ids = kit.backend.upload(arrays["ids"])
    out = []
    for role in ("embed", "tensor"):
        table = kit.backend.upload(arrays["table"], fields["dtype"], Partition(0), role)
        out += in_step(kit, lambda ops, a: ops.embed(a["t"], a["i"]), {"t": table, "i": ids})
    return _named(out)


def linear(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """A projection cut by its inputs and summed, and one cut by its outputs and joined."""
    dtype, upload = fields["dtype"], kit.backend.upload
    x, w = arrays["x"], arrays["w"]
    given = {
        "x": upload(x, dtype),
        "x_part": upload(x, dtype, Partition(1)),
        "by_inputs": upload(w, dtype, Partition(1), "linear"),
        "by_outputs": upload(w, dtype, Partition(0), "linear"),
    }

    def run(ops: Any, a: Mapping[str, Any]) -> Any:
        summed = ops.all_reduce(ops.linear(a["x_part"], a["by_inputs"]))
        return summed, ops.all_gather(ops.linear(a["x"], a["by_outputs"]))

    return _named(in_step(kit, run, given))


class _Watched:
    """A weight that counts what is read of it."""

    dtype = "float32"

    def __init__(self, whole: Host) -> None:
        self._whole, self.shape, self.num_read = whole, whole.shape, 0

    def read(self, index: tuple[slice, ...] | None = None) -> Host:
        part: Host = self._whole if index is None else self._whole[index]
        self.num_read += part.size
        return part


def weights(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """This rank's part of a weight for each partition, and how many elements were read for it."""
    out: dict[str, Host] = {}
    for i, (axis, heads, unit) in enumerate(fields["partitions"]):
        source = _Watched(arrays["w"])
        part = kit.backend.upload(source, "float32", Partition(axis, heads, unit))
        out[f"part {i}"] = kit.get(part)
        out[f"read {i}"] = np.array(source.num_read)
    return out


def kv(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """Bytes of a block, and this rank's heads of blocks that were written and are read again."""
    layers = tuple(KVLayerSpec(heads, fields["dim"]) for heads in fields["heads"])
    spec = KVSpec(layers, fields["block_size"], fields["dtype"])
    backend, out = kit.backend, {"bytes": np.array(kit.backend.kv_block_bytes(spec))}
    cache = backend.kv_alloc(spec, 5)
    for i in range(len(cache)):
        cache[i] = backend.kv_write(cache[i], [3, 1], arrays[f"data {i}"])
    for i, layer in enumerate(cache):
        out[f"layer {i}"] = np.asarray(backend.kv_read(layer, [1, 3])).astype(np.float64)
    backend.kv_free(cache)
    return out


def rows(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """Sums of a batch, twice, and of each of its rows alone."""
    cut = kit.backend.upload(arrays["x"], fields["dtype"], Partition(0))
    count = arrays["x"].shape[0] // fields["count"]

    def together(ops: Any, a: Mapping[str, Any]) -> Any:
        return ops.all_reduce(a["x"])

    def alone(ops: Any, a: Mapping[str, Any]) -> Any:
        return tuple(ops.all_reduce(a["x"][i : i + 1]) for i in range(count))

    first, again = (in_step(kit, together, {"x": cut})[0] for _ in range(2))
    singly = np.concatenate(in_step(kit, alone, {"x": cut}))
    return {"first": first, "again": again, "alone": singly}


def replays(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """One captured step that exchanges, replayed on other tokens, and then again and again."""
    caps, ids = kit.backend.caps, arrays["ids"]
    size, count = caps.block_sizes[0], ids.shape[1]
    dim = caps.head_dims[0] if caps.head_dims else 64
    kv_d = kit.backend.kv_alloc(KVSpec((KVLayerSpec(1, dim),), size, caps.kv_dtypes[0]), 4)
    table = kit.backend.upload(arrays["table"], fields["dtype"], Partition(0), "embed")
    row = Row(count, count, (1,) * -(-count // size))
    batches = [make_batch(BatchSpec((row,), size, 0, extra={"token_ids": some})) for some in ids]

    def step(w: Any, kv_in: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
        found = kit.ops.embed(w["t"], inputs.token_ids)
        return {"out": kit.ops.all_gather(kit.ops.all_reduce(found))}, kv_in

    compiled = kit.compile(step, batches[0], {"t": table}, kv_d, capture=True)
    out = {}
    for i, batch in enumerate(batches):
        outputs, kv_d = compiled.run(batch, kv_d)
        out[str(i)] = kit.get(outputs["out"])
    gc.collect()
    before = kit.backend.memory().used
    for i in range(REPLAYS):
        outputs, kv_d = compiled.run(batches[i % len(batches)], kv_d)
        # As the core does. Left to queue up, what several devices do together may starve on a
        # host of few cores, and XLA ends a process whose devices do not meet in time.
        kit.get(outputs["out"])
    gc.collect()
    out["growth"] = np.array(kit.backend.memory().used - before)
    compiled.close()
    kit.backend.kv_free(kv_d)
    return out


def model(kit: Kit, fields: Fields, arrays: Arrays) -> Arrays:
    """Greedy tokens of a prompt and the logits that they were taken from."""
    driver = Driver(kit, TinyModel(**fields["model"]), capture=fields["capture"])
    prompt = [int(token) for token in arrays["prompt"]]
    stream = driver.generate(prompt, fields["count"], fields["chunk"])
    driver.close()
    return {"tokens": np.array(stream.tokens), "logits": np.stack(stream.logits)}


PROGRAMS: Mapping[str, Program] = {
    function.__name__: function
    for function in (exchange, embed, linear, weights, kv, rows, replays, model)
}

__all__ = ["PROGRAMS", "REPLAYS"]
