"""Groups B, C, D, F and G over the ranks of a tensor-parallel group: what they do together.

Wanted is what the definition gives on whole arrays, and the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.case import Case, ConformanceFailure
from leadframe.conformance.kit import ORACLE, Kit
from leadframe.conformance.rank_group import (
    ProcessRanks,
    Reply,
    group_of,
    no_processes,
    no_ranks,
)
from leadframe.platform import KVLayerSpec, KVSpec

Host = npt.NDArray[Any]

_SHAPES = ((1, 2), (5, 7), (3, 33), (2, 3, 5), (1, 257), (64, 16))
_GROWTH = 1 << 16


def _ask(
    kit: Kit, program: str, fields: Mapping[str, Any], arrays: Mapping[str, Host]
) -> list[Reply]:
    """Asks every rank, and wants the same bits from all of them."""
    replies = group_of(kit).ask(program, fields, arrays)
    for rank, reply in enumerate(replies[1:], 1):
        for name, value in replies[0].items():
            kit.same(
                f"{program}: result {name} of rank {rank} against rank 0's", reply[name], value
            )
    return replies


def _exact(kit: Kit, host: Host, dtype: str) -> npt.NDArray[np.float64]:
    """The values after rounding to the dtype."""
    _, exact = kit.put(host.astype(np.float32), dtype)
    return np.asarray(exact, np.float64)


def _inputs(kit: Kit, rng: np.random.Generator) -> dict[str, Host]:
    """For every shape of a rank's part: numbers that no sum rounds, zeros, and random numbers."""
    out, count = {}, group_of(kit).count
    for shape in _SHAPES:
        whole = (count * shape[0], *shape[1:])
        size = "x".join(map(str, shape))
        out[f"integers {size}"] = rng.integers(-8, 9, whole).astype(np.float32)
        out[f"zeros {size}"] = np.zeros(whole, np.float32)
        out[f"random {size}"] = rng.standard_normal(whole).astype(np.float32)
    return out


def _sums_and_joins(kit: Kit) -> None:
    """`all_reduce` adds, `all_gather` joins along the last axis; neither changes its argument."""
    for dtype in kit.backend.caps.compute_dtypes:
        given = _inputs(kit, kit.rng)
        reply = _ask(kit, "exchange", {"dtype": dtype}, given)[0]
        for i, (name, host) in enumerate(given.items()):
            parts = np.split(_exact(kit, host, dtype), group_of(kit).count)
            total, joined, sliced = (reply[str(3 * i + k)] for k in range(3))
            what = f"of {name} in {dtype}"
            kit.same(f"all_gather {what}", joined, np.concatenate(parts, -1))
            for got, want in ((total, sum(parts)), (sliced, sum(p[..., 1:] for p in parts))):
                if name.startswith("random"):
                    kit.close_to("all_reduce", got, np.asarray(want), dtype)
                else:
                    kit.same(f"all_reduce {what}", got, np.asarray(want))


def _not_finite(kit: Kit) -> None:
    """NaN and infinities of one rank arrive where they stood and nowhere else."""
    count, dtype = group_of(kit).count, kit.dtype
    whole = kit.rng.integers(-8, 9, (count * 4, 19)).astype(np.float32)
    whole[0, 3], whole[-1, 3] = np.inf, -np.inf
    whole[1, 5], whole[-2, 7], whole[-1, 18] = np.nan, np.inf, -np.inf
    reply = _ask(kit, "exchange", {"dtype": dtype}, {"x": whole})[0]
    parts = np.split(whole.astype(np.float64), count)
    with np.errstate(invalid="ignore"):
        want = np.sum(parts, axis=0)
    kit.same("all_reduce of infinities and NaN", reply["0"], want)
    kit.same("all_gather of infinities and NaN", reply["1"], np.concatenate(parts, -1))


def _embed(kit: Kit) -> None:
    """A table that is cut by rows of the vocabulary gives the rows of the whole one."""
    count = group_of(kit).count
    vocab = 11 * count
    table = kit.rng.standard_normal((vocab, 64)).astype(np.float32)
    table[5, 3] = np.inf
    table[[0, 10, 11, -1]] = np.nan  # the rows that a rank looks up in place of another's
    ids = np.array([1, 10, 11, vocab - 2, 5, 0, vocab - 1, 12, -1, 2**30], np.int32)
    for dtype in kit.backend.caps.compute_dtypes:
        reply = _ask(kit, "embed", {"dtype": dtype}, {"table": table, "ids": ids})[0]
        want = _exact(kit, table, dtype)
        clamped = want[np.clip(ids, 0, vocab - 1)]
        for role, got in zip(("embed", "tensor"), reply.values(), strict=True):
            kit.same(f"rows of a shared table of role {role!r} in {dtype}", got, clamped)


def _linear(kit: Kit) -> None:
    """Projections that are cut by inputs or by outputs give what the whole one gives."""
    count, rng = group_of(kit).count, kit.rng
    x = rng.standard_normal((5, 24 * count)).astype(np.float32)
    w = (rng.standard_normal((10 * count, 24 * count)) / 8).astype(np.float32)
    for dtype in kit.backend.caps.compute_dtypes:
        reply = _ask(kit, "linear", {"dtype": dtype}, {"x": x, "w": w})[0]
        want = ORACLE["linear"](_exact(kit, x, dtype), _exact(kit, w, dtype))
        for got in reply.values():
            kit.close_to("linear", got, want, dtype)


def _partitions(count: int) -> list[tuple[int | None, int | None, int]]:
    """(axis, heads, unit) for a weight [12 count, 6 count]; the last has a head for all ranks."""
    return [
        (0, None, 1), (1, None, 1), (0, 2 * count, 6), (1, count, 6), (None, None, 1),
        (0, 1, 12 * count),
    ]  # fmt: skip


def _part(whole: Host, axis: int | None, heads: int | None, rank: int, count: int) -> Host:
    if axis is None or heads == 1:
        return whole
    return np.split(whole, count, axis)[rank]


def _weights(kit: Kit) -> None:
    """A rank holds its own part of a weight, and reads no more of the source than that."""
    count = group_of(kit).count
    whole = kit.rng.standard_normal((12 * count, 6 * count)).astype(np.float32)
    partitions = _partitions(count)
    replies = group_of(kit).ask("weights", {"partitions": partitions}, {"w": whole})
    for rank, reply in enumerate(replies):
        for i, (axis, heads, unit) in enumerate(partitions):
            want = _part(whole, axis, heads, rank, count)
            what = f"rank {rank}'s part by axis {axis}, {heads} heads of {unit}"
            kit.same(what, reply[f"part {i}"], want)
            num_read = int(reply[f"read {i}"])
            kit.check(num_read <= want.size, f"{what}: {num_read} elements read of {want.size}")


def _kv(kit: Kit) -> None:
    """A rank's cache has its KV heads, or one that several hold, and costs what that costs."""
    caps, count = kit.backend.caps, group_of(kit).count
    dim = caps.head_dims[0] if caps.head_dims else 64
    size, dtype = caps.block_sizes[0], caps.kv_dtypes[0]
    local = (2, 1)
    data = {
        f"data {i}": kit.rng.integers(-4, 5, (2, 2, size, heads, dim)).astype(np.float32)
        for i, heads in enumerate(local)
    }
    asked = {"heads": [2 * count, 1], "dim": dim, "block_size": size, "dtype": dtype}
    own = KVSpec(tuple(KVLayerSpec(heads, dim) for heads in local), size, dtype)
    want = kit.backend.kv_block_bytes(own)
    for rank, reply in enumerate(group_of(kit).ask("kv", asked, data)):
        for i in range(len(local)):
            kit.same(f"KV of rank {rank}", reply[f"layer {i}"], data[f"data {i}"][::-1])
        kit.same(f"kv_block_bytes of rank {rank}", reply["bytes"], np.array(want))


def _replays(kit: Kit) -> None:
    """A captured step exchanges anew in each run, and many runs take no memory."""
    count, rng = group_of(kit).count, kit.rng
    table = rng.integers(-8, 9, (11 * count, 64)).astype(np.float32)
    ids = rng.integers(0, 11 * count, (3, 12)).astype(np.int32)
    asked = {"dtype": kit.dtype}
    replies = group_of(kit).ask("replays", asked, {"table": table, "ids": ids})
    for rank, reply in enumerate(replies):
        for i, some in enumerate(ids):
            want = np.tile(count * table[some], (1, count))
            kit.same(f"run {i} on rank {rank}", reply[str(i)], want)
        growth = int(reply["growth"])
        kit.check(growth < _GROWTH, f"runs on rank {rank} grew memory by {growth:,} bytes")


def _reruns(kit: Kit) -> None:
    """The same bits again, and in any batch, where that is claimed; measured where not."""
    caps, count = kit.backend.caps, group_of(kit).count
    x = kit.rng.standard_normal((count * 9, 65)).astype(np.float32)
    reply = _ask(kit, "rows", {"dtype": kit.dtype}, {"x": x})[0]
    claims = {"again": (caps.deterministic, "deterministic")}
    claims["alone"] = (caps.batch_invariant, "batch invariant")
    for name, (is_claimed, word) in claims.items():
        off = float(np.abs(reply[name].astype(np.float64) - reply["first"]).max())
        kit.metrics[f"{name}_difference"] = off
        kit.check(
            not is_claimed or off == 0.0, f"claims to be {word}; all_reduce differs by {off:g}"
        )


def _close(kit: Kit) -> None:
    """Every rank closes, and none waits for another that has closed."""
    group = group_of(kit)
    if not isinstance(group, ProcessRanks):
        raise ConformanceFailure("rank_processes is claimed by a group in one process")
    _sums_and_joins(kit)
    group.leave()


_TOGETHER: Sequence[tuple[str, Any]] = (
    ("B.ranks[exchange]", _sums_and_joins),
    ("B.ranks[not-finite]", _not_finite),
    ("B.ranks[embed]", _embed),
    ("B.ranks[linear]", _linear),
    ("D.ranks[replays]", _replays),
    ("F.ranks[reruns]", _reruns),
)
_BY_PROCESS: Sequence[tuple[str, Any]] = (
    ("B.ranks[weights]", _weights),
    ("C.ranks[kv]", _kv),
    ("G.ranks[close]", _close),
)

CASES = [
    *(Case(name, run, "core", no_ranks) for name, run in _TOGETHER),
    *(Case(name, run, "core", no_processes) for name, run in _BY_PROCESS),
]
