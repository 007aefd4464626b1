"""Group C: memory. What a backend says about bytes is true, and nothing leaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from leadframe.conformance.attention_cases import Shape
from leadframe.conformance.case import Case, naming
from leadframe.conformance.groups.b_attention import fit
from leadframe.conformance.groups.b_layers import in_step
from leadframe.conformance.kit import Kit
from leadframe.errors import DeviceOOM, LeadframeError
from leadframe.platform import KV, KVLayerSpec, KVSpec
from leadframe.platform.backend import WeightBlocks, WeightRole

_SLACK = 1 << 16  # allocators round up; a pool of blocks is far larger


def kv_spec(kit: Kit, layers: int = 2) -> KVSpec:
    """A small cache of layers of unequal width, where the backend allows it."""
    shape = fit(kit, Shape())
    kinds = [KVLayerSpec(2, shape.dim), KVLayerSpec(1, shape.dim)]
    return KVSpec(tuple(kinds[i % 2] for i in range(layers)), shape.block_size, shape.dtype)


def canonical_shape(spec: KVSpec, layer: int, num: int) -> tuple[int, ...]:
    """The canonical shape of `num` blocks of a layer."""
    kind = spec.layers[layer]
    return (num, 2, spec.block_size, kind.num_kv_heads, kind.head_dim)


def _used(kit: Kit) -> int:
    return kit.backend.memory().used


def _block_bytes(kit: Kit) -> None:
    """kv_block_bytes times blocks is what kv_alloc takes, to 2%."""
    spec = kv_spec(kit)
    per_block = kit.backend.kv_block_bytes(spec)
    num = max(64, (1 << 23) // per_block)
    before = _used(kit)
    kv = kit.backend.kv_alloc(spec, num)
    delta, claimed = _used(kit) - before, per_block * num
    kit.metrics.update(claimed_bytes=claimed, measured_bytes=delta)
    kit.backend.kv_free(kv)
    off = abs(delta - claimed)
    kit.check(
        off <= 0.02 * claimed + _SLACK,
        f"kv_block_bytes × {num} is {claimed:,} bytes; memory().used grew by {delta:,}",
    )


def _arithmetic(kit: Kit) -> None:
    """A block costs at least its elements, and no more than four times that."""
    spec = kv_spec(kit)
    sizes = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    elements = sum(2 * s.num_kv_heads * s.head_dim for s in spec.layers) * spec.block_size
    least = elements * sizes.get(spec.dtype, 1)
    claimed = kit.backend.kv_block_bytes(spec)
    kit.check(least <= claimed <= 4 * least, f"kv_block_bytes is {claimed:,}, elements {least:,}")


def _cycles(kit: Kit) -> None:
    """200 rounds of allocate and free: memory does not grow."""
    spec = kv_spec(kit)
    kit.backend.kv_free(kit.backend.kv_alloc(spec, 16))
    before = _used(kit)
    for _ in range(200):
        kit.backend.kv_free(kit.backend.kv_alloc(spec, 16))
    growth = _used(kit) - before
    kit.check(growth < kit.backend.kv_block_bytes(spec) * 16, f"200 cycles leak {growth:,} bytes")


def _zeroed(kit: Kit) -> None:
    """Fresh KV is zero, also where freed KV was not."""
    spec = kv_spec(kit)
    for _ in range(3):
        kv = kit.backend.kv_alloc(spec, 8)
        for i, layer in enumerate(kv):
            shape = canonical_shape(spec, i, 8)
            got = np.asarray(kit.backend.kv_read(layer, list(range(8))))
            kit.same("fresh KV", got.astype(np.float64), np.zeros(shape))
            kv[i] = kit.backend.kv_write(layer, list(range(8)), np.full(shape, 3.0, np.float32))
        kit.backend.kv_free(kv)


def _oversize(kit: Kit) -> None:
    """Far too much is `DeviceOOM`, and the backend still works."""
    spec = kv_spec(kit)
    total = kit.backend.memory().total
    num = min(4 * total // kit.backend.kv_block_bytes(spec), 2**40)
    before = _used(kit)
    error = kit.raises(DeviceOOM, f"kv_alloc of {num:,} blocks", lambda: _alloc(kit, spec, num))
    kit.check(isinstance(error, DeviceOOM) and bool(error.phase), "DeviceOOM names no phase")
    kit.check(_used(kit) - before < _SLACK, "a failed kv_alloc left memory behind")
    _zeroed(kit)


def _alloc(kit: Kit, spec: KVSpec, num: int) -> KV:
    return kit.backend.kv_alloc(spec, int(num))


def _round_trip(kit: Kit) -> None:
    """kv_read returns what kv_write wrote, in the order of the ids, and nothing else changes."""
    spec, rng = kv_spec(kit, 3), kit.rng
    kv = kit.backend.kv_alloc(spec, 12)
    for i in range(3):
        pool = np.zeros(canonical_shape(spec, i, 12))
        for _ in range(4):
            ids = rng.permutation(12)[:4]
            data = rng.integers(-100, 100, canonical_shape(spec, i, 4)).astype(np.float32)
            kv[i] = kit.backend.kv_write(kv[i], ids.tolist(), data)
            pool[ids] = data
        order = rng.permutation(12)
        got = np.asarray(kit.backend.kv_read(kv[i], order.tolist()))
        kit.same("kv_read", got.astype(np.float64), pool[order])
        one = np.asarray(kit.backend.kv_read(kv[i], [5]))
        kit.same("kv_read of one block", one.astype(np.float64), pool[5:6])
    kit.backend.kv_free(kv)


def _layers_are_apart(kit: Kit) -> None:
    spec = kv_spec(kit, 4)
    kv = kit.backend.kv_alloc(spec, 4)
    kit.check(len(kv) == 4, f"kv_alloc returned {len(kv)} handles for 4 layers")
    for i in range(4):
        data = np.full(canonical_shape(spec, i, 4), i + 1, np.float32)
        kv[i] = kit.backend.kv_write(kv[i], [0, 1, 2, 3], data)
    for i in range(4):
        got = np.asarray(kit.backend.kv_read(kv[i], [0, 3])).astype(np.float64)
        kit.same(f"layer {i}", got, np.full(canonical_shape(spec, i, 2), float(i + 1)))
    kit.backend.kv_free(kv)


def _upload_copies(kit: Kit) -> None:
    """The host may reuse its array after `upload`, and write into what `download` returned."""
    host = np.arange(4096, dtype=np.float32)
    array = kit.backend.upload(host)
    host[:] = -1
    first = kit.get(array)
    kit.same("uploaded array", first, np.arange(4096, dtype=np.float32))
    if first.flags.writeable:
        first[:] = -2
    kit.same("uploaded array, again", kit.get(array), np.arange(4096, dtype=np.float32))


def _upload_types(kit: Kit) -> None:
    for dtype in ("int32", *kit.backend.caps.compute_dtypes):
        host = np.arange(-8, 8).astype(np.float32 if dtype != "int32" else np.int32)
        got = kit.get(kit.backend.upload(host.reshape(4, 4), dtype))
        kit.same(f"{dtype} array", got.astype(np.float64), host.reshape(4, 4).astype(np.float64))
    flags = kit.get(kit.backend.upload(np.array([True, False])))
    kit.same("bool array", flags.astype(bool), np.array([True, False]))
    empty = kit.get(kit.backend.upload(np.zeros((0, 4), np.float32)))
    kit.check(empty.shape == (0, 4), f"an empty array came back as {empty.shape}")
    odd = np.arange(12, dtype=np.float32).reshape(3, 4).T
    kit.same("array with strides", kit.get(kit.backend.upload(odd)), odd)


def _upload_rounds(kit: Kit) -> None:
    """Numbers are rounded to the nearest of the dtype.

    Every other case takes for exact what comes back: one that loses bits here would hide there.
    """
    import ml_dtypes

    host = (kit.rng.standard_normal((9, 33)) * 3).astype(np.float32)
    for dtype in kit.backend.caps.compute_dtypes:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        got = kit.get(kit.backend.upload(host, dtype)).astype(np.float64)
        kit.same(f"{dtype} array of drawn numbers", got, host.astype(kind).astype(np.float64))


def _plain(kit: Kit) -> None:
    """An array of any role serves every op, so that tied weights need one."""
    host = kit.rng.integers(-8, 9, (32, 64)).astype(np.float32)
    ids, x = np.array([31, 0, 7, 7], np.int32), np.ones((3, 64), np.float32)
    roles: tuple[WeightRole, ...] = ("linear", "embed", "tensor")
    for role in roles:
        given = {
            "w": kit.backend.upload(host, kit.dtype, role=role),
            "i": kit.backend.upload(ids),
            "x": kit.backend.upload(x, kit.dtype),
        }
        kit.same(f"array of role {role!r}", kit.get(given["w"]).astype(np.float32), host)
        with naming(f"plain_weights is claimed; role {role!r}"):
            found, out = in_step(
                kit, lambda ops, a: (ops.embed(a["w"], a["i"]), ops.linear(a["x"], a["w"])), given
            )
            kit.same("embed", found.astype(np.float32), host[ids])
            kit.close_to("linear", out, (x @ host.T).astype(np.float64))


def _plain_not_claimed(kit: Kit) -> str | None:
    return None if kit.backend.caps.plain_weights else "plain_weights is not claimed"


class LazyWeight:
    """A weight that records what was read of it."""

    def __init__(self, data: npt.NDArray[Any]) -> None:
        self.data = data
        self.reads: list[tuple[slice, ...] | None] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole weight's shape."""
        return self.data.shape

    @property
    def dtype(self) -> str:
        """What `read` returns."""
        return str(self.data.dtype)

    def read(self, index: tuple[slice, ...] | None = None) -> npt.NDArray[Any]:
        """Reads a part."""
        self.reads.append(index)
        return self.data if index is None else self.data[index]


class BlockWeight(LazyWeight):
    """A quantised weight: what `read` returns is what its blocks stand for.

    Args:
      rng: draws it.
      bits: 4 or 8.
      has_offset: whether blocks have one.
    """

    def __init__(self, rng: np.random.Generator, bits: Literal[4, 8], has_offset: bool) -> None:
        low, high = (0, 16) if bits == 4 else (-128, 128)
        values = rng.integers(low, high, (24, 96)).astype(np.int8)
        scale = (rng.integers(1, 9, (24, 3)) / 64).astype(np.float16)
        offset = (rng.integers(-64, 65, (24, 3)) / 16).astype(np.float16) if has_offset else None
        self.blocks = WeightBlocks(values, scale, offset, bits)
        whole = values * np.repeat(scale, 32, 1).astype(np.float32)
        super().__init__(whole if offset is None else whole + np.repeat(offset, 32, 1))

    def read_blocks(self, index: tuple[slice, ...] | None = None) -> WeightBlocks | None:
        """All blocks; of a slice none, which is allowed."""
        return self.blocks if index is None else None


def _blocks(kit: Kit) -> None:
    """A quantised weight may be taken as it is stored, and stands for the same numbers."""
    x, exact = kit.put(kit.rng.standard_normal((5, 96)).astype(np.float32), kit.dtype)
    kinds: tuple[Literal[4, 8], ...] = (4, 8)
    for bits, has_offset in itertools.product(kinds, (False, True)):
        source = BlockWeight(kit.rng, bits, has_offset)
        weight = kit.backend.upload(source, kit.dtype, role="linear")
        (got,) = in_step(kit, lambda ops, a: ops.linear(a["x"], a["w"]), {"x": x, "w": weight})
        with naming(f"{bits} bits, {'with' if has_offset else 'without'} offsets"):
            kit.close_to("linear", got, exact @ source.data.astype(np.float64).T)


def _weights(kit: Kit) -> None:
    import ml_dtypes

    rng = kit.rng
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
        data = rng.integers(-50, 50, (24, 32)).astype(kind)
        source = LazyWeight(data)
        array = kit.backend.upload(source, kit.dtype)
        kit.same("weight", kit.get(array).astype(np.float64), data.astype(np.float64))
        kit.check(len(source.reads) >= 1, "upload did not read the weight")


def _accounting(kit: Kit) -> None:
    """memory() makes sense before, during and after an allocation."""
    before = kit.backend.memory()
    kit.check(before.total > 0, f"total is {before.total}")
    kit.check(0 <= before.used <= before.peak, f"used {before.used}, peak {before.peak}")
    kit.check(0 <= before.free <= before.total, f"free {before.free} of {before.total}")
    array = kit.backend.upload(np.zeros(1 << 20, np.float32))
    during = kit.backend.memory()
    grown = during.used - before.used
    kit.check(grown >= (1 << 22) - _SLACK, f"4 MiB were uploaded and used grew by {grown:,} bytes")
    kit.check(during.peak >= during.used, f"peak {during.peak} is below used {during.used}")
    del array
    after = kit.backend.memory()
    kit.check(after.used < before.used + (1 << 21), "dropping an array does not free it")
    kit.check(after.peak >= during.used, "peak went down")


def _unknown_dtype(kit: Kit) -> None:
    spec = KVSpec(kv_spec(kit).layers, kv_spec(kit).block_size, "float3")
    kit.raises(LeadframeError, "kv_alloc of dtype float3", lambda: kit.backend.kv_alloc(spec, 2))


def _state_machine(kit: Kit) -> None:
    """Random allocate, write, copy, read and free against a NumPy pool."""
    for round_ in range(3):
        _random_walk(kit, np.random.default_rng([kit.seed, round_]), 60)


def _random_walk(kit: Kit, rng: np.random.Generator, steps: int) -> None:
    spec = kv_spec(kit)
    pools: list[tuple[KV, list[npt.NDArray[Any]]]] = []
    for _ in range(steps):
        action = rng.integers(0, 6)
        if not pools or (action == 0 and len(pools) < 3):
            num = int(rng.integers(6, 20))
            model = [np.zeros(canonical_shape(spec, i, num)) for i in range(2)]
            pools.append((kit.backend.kv_alloc(spec, num), model))
            continue
        kv, model = pools[int(rng.integers(0, len(pools)))]
        layer = int(rng.integers(0, 2))
        ids = rng.permutation(len(model[layer]))[:4]
        if action == 1 and len(pools) > 1:
            kit.backend.kv_free(kv)
            pools = [pool for pool in pools if pool[0] is not kv]
        elif action in (2, 3):
            data = rng.integers(-99, 99, canonical_shape(spec, layer, 4)).astype(np.float32)
            kv[layer] = kit.backend.kv_write(kv[layer], ids.tolist(), data)
            model[layer][ids] = data
        elif action == 4:
            src, dst = ids[:2].astype(np.int32), ids[2:].astype(np.int32)
            kv[layer] = kit.ops.kv_copy(kv[layer], src, dst)
            model[layer][dst] = model[layer][src]
        else:
            _compare_pools(kit, pools)
    _compare_pools(kit, pools)
    for kv, _ in pools:
        kit.backend.kv_free(kv)


def _compare_pools(kit: Kit, pools: Sequence[tuple[KV, list[npt.NDArray[Any]]]]) -> None:
    for kv, model in pools:
        for layer, want in zip(kv, model, strict=True):
            got = np.asarray(kit.backend.kv_read(layer, list(range(len(want)))))
            kit.same("pool of the state machine", got.astype(np.float64), want)


CASES = [
    Case("C.kv_block_bytes[measured]", _block_bytes),
    Case("C.kv_block_bytes[arithmetic]", _arithmetic),
    Case("C.kv_alloc[200-cycles]", _cycles),
    Case("C.kv_alloc[zeroed]", _zeroed),
    Case("C.kv_alloc[oversize]", _oversize),
    Case("C.kv_alloc[unknown-dtype]", _unknown_dtype),
    Case("C.kv_read[round-trip]", _round_trip),
    Case("C.kv_read[layers]", _layers_are_apart),
    Case("C.upload[copies]", _upload_copies),
    Case("C.upload[types]", _upload_types),
    Case("C.upload[rounds]", _upload_rounds),
    Case("C.upload[plain]", _plain, "core", _plain_not_claimed),
    Case("C.upload[weights]", _weights),
    Case("C.upload[blocks]", _blocks),
    Case("C.memory[accounting]", _accounting),
    Case("C.pool[state-machine]", _state_machine),
]
