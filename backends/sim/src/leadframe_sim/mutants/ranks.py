"""Ranks of a tensor-parallel group that share a model wrongly, and sound ones to make them from."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from leadframe.platform import (
    KV,
    Backend,
    Capabilities,
    Device,
    DeviceLost,
    KVSpec,
    Limits,
    Partition,
    WeightRole,
    WeightSource,
)
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe_sim.mutants.base import Mutant
from leadframe_sim.mutants.plugins import stub_plugin

_MOST: Final = 4
_WAIT_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 2e-4

_Array = npt.NDArray[Any]


class Meeting:
    """Where ranks swap arrays: files in their private directory.

    Args:
      limits: which rank this is, and where they meet.

    Attributes:
      rank: this one.
      count: how many there are.
      turn: swaps so far.
    """

    def __init__(self, limits: Limits) -> None:
        self.rank, self.count = limits.rank, limits.tensor_parallel_size
        self._folder, self.turn = Path(limits.rendezvous), 0

    def swap(self, x: _Array, seconds: float = _WAIT_SECONDS) -> list[_Array]:
        """Gives x to the others and returns everyone's, in the order of ranks.

        Raises:
          DeviceLost: one does not come.
        """
        hidden = self._folder / f"hidden-{self.rank}.npy"
        np.save(hidden, x)
        os.replace(hidden, self._file(self.rank))
        end = time.monotonic() + seconds
        parts = [x if rank == self.rank else self._take(rank, end) for rank in range(self.count)]
        self.turn += 1
        # Who has come to this turn has taken all of the one before it.
        (self._folder / f"{self.turn - 2}-{self.rank}.npy").unlink(missing_ok=True)
        return parts

    def _file(self, rank: int) -> Path:
        return self._folder / f"{self.turn}-{rank}.npy"

    def _take(self, rank: int, end: float) -> _Array:
        while not self._file(rank).exists():
            if time.monotonic() > end:
                raise DeviceLost(f"rank {rank} of {self.count} does not come")
            time.sleep(_PAUSE_SECONDS)
        found: _Array = np.load(self._file(rank))
        return found


class SharedReference(ReferenceBackend):
    """The NumPy backend as one rank of several; sound.

    Args:
      limits: which one, of how many.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__()
        self.meeting = Meeting(limits or Limits())
        self._shared: Capabilities = replace(
            super().caps, tensor_parallel=_MOST, rank_processes=True
        )
        if self.meeting.count > 1:
            own = {"all_reduce": self.all_reduce, "all_gather": self.all_gather}
            self._ops = {**self._ops, **own, "embed": self.embed}

    @property
    def caps(self) -> Capabilities:
        """Those of NumPy, on several ranks."""
        return self._shared

    def all_reduce(self, x: _Array) -> _Array:
        """Sum over the ranks, first to last."""
        first, *others = self.meeting.swap(x)
        total = first.copy()
        for other in others:
            total += other
        return total

    def all_gather(self, x: _Array) -> _Array:
        """Join along the last axis."""
        return np.concatenate(self.meeting.swap(x), -1)

    def embed(self, table: _Array, token_ids: _Array) -> _Array:
        """Rows of a table whose vocabulary the ranks share."""
        share = len(table)
        local = np.clip(token_ids, 0, share * self.meeting.count - 1) - self.meeting.rank * share
        is_mine = (local >= 0) & (local < share)
        return self.all_reduce(self.only(is_mine, table[np.clip(local, 0, share - 1)]))

    def only(self, is_mine: _Array, rows: _Array) -> _Array:
        """The rows that this rank holds, and zeros."""
        return np.where(is_mine[:, None], rows, np.zeros_like(rows))

    def place(self, partition: Partition) -> int:
        """Which part of a weight this rank holds."""
        return self.meeting.rank

    def upload(
        self,
        source: _Array | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> _Array:
        """Copies this rank's part."""
        part = self._part(tuple(source.shape), partition)
        if part is None:
            return super().upload(source, dtype, None, role)
        host = source[part] if isinstance(source, np.ndarray) else self.read(source, part)
        return super().upload(np.ascontiguousarray(host), dtype, None, role)

    def read(self, source: WeightSource, part: tuple[slice, ...]) -> _Array:
        """Reads a part of a weight."""
        return source.read(part)

    def _part(self, shape: tuple[int, ...], partition: Partition | None) -> Any:
        count = self.meeting.count
        if count == 1 or partition is None or partition.axis is None:
            return None
        heads, unit = partition.heads or shape[partition.axis], partition.unit
        size = max(1, heads // count)
        first = self.place(partition) * heads // count
        cut = slice(first * unit, (first + size) * unit)
        return tuple(cut if a == partition.axis else slice(None) for a in range(len(shape)))

    def own(self, spec: KVSpec) -> KVSpec:
        """What this rank holds of a cache."""
        layers = tuple(
            replace(layer, num_kv_heads=max(1, layer.num_kv_heads // self.meeting.count))
            for layer in spec.layers
        )
        return replace(spec, layers=layers)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of this rank's heads."""
        return super().kv_block_bytes(self.own(spec))

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates this rank's heads."""
        own = self.own(spec)
        dtype, size = self._kv_dtype(spec), spec.block_size
        self._reserve(super().kv_block_bytes(own) * num_blocks, "kv")
        shapes = [(num_blocks, size, 2 * s.num_kv_heads, s.head_dim) for s in own.layers]
        return [self._ledger.hold(np.zeros(shape, dtype)) for shape in shapes]


class _MeetsAtOnce(SharedReference):
    """Waits for the others when it is created, which the core does one after the other."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        if self.meeting.count > 1:
            self.meeting.swap(np.zeros(1), seconds=1.0)


class _LocalSum(SharedReference):
    def all_reduce(self, x: _Array) -> _Array:
        return x


class _FromItself(SharedReference):
    """Adds its own part first, as every rank would like to."""

    def all_reduce(self, x: _Array) -> _Array:
        parts, rank = self.meeting.swap(x), self.meeting.rank
        total = parts[rank].copy()
        for part in parts[rank + 1 :] + parts[:rank]:
            total += part
        return total


class _InPlace(SharedReference):
    def all_reduce(self, x: _Array) -> _Array:
        x[...] = super().all_reduce(x)
        return x


class _JoinsRows(SharedReference):
    def all_gather(self, x: _Array) -> _Array:
        return np.concatenate(self.meeting.swap(x), 0)


class _TimesZero(SharedReference):
    def only(self, is_mine: _Array, rows: _Array) -> _Array:
        mine: _Array = rows * is_mine[:, None].astype(rows.dtype)
        return mine


class _WrongSlice(SharedReference):
    """Takes the next rank's part of what is cut by inputs."""

    def place(self, partition: Partition) -> int:
        count = self.meeting.count
        return (self.meeting.rank + int(partition.axis == 1)) % count


class _ReadsAll(SharedReference):
    def read(self, source: WeightSource, part: tuple[slice, ...]) -> _Array:
        return source.read()[part]


class _WholeBytes(SharedReference):
    def kv_block_bytes(self, spec: KVSpec) -> int:
        return ReferenceBackend.kv_block_bytes(self, spec)


class _OldSum(SharedReference):
    """Remembers a sum by shape, as a recording that the exchange is no part of does."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._sums: dict[Any, _Array] = {}

    def all_reduce(self, x: _Array) -> _Array:
        if x.shape not in self._sums:
            self._sums[x.shape] = super().all_reduce(x)
        return self._sums[x.shape]


class _Keeps(SharedReference):
    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._kept: list[_Array] = []

    def all_gather(self, x: _Array) -> _Array:
        self._kept.append(self._ledger.hold(super().all_gather(x)))
        return self._kept[-1]


class _ByTurn(SharedReference):
    """Adds first whoever comes first."""

    def all_reduce(self, x: _Array) -> _Array:
        turn = self.meeting.turn
        parts = self.meeting.swap(x)
        first = turn % len(parts)
        total = parts[first].copy()
        for part in parts[first + 1 :] + parts[:first]:
            total += part
        return total


class _WaitsToClose(SharedReference):
    def close(self) -> None:
        if self.meeting.count > 1:
            self.meeting.swap(np.zeros(1), seconds=0.5)
        super().close()


class _AsManyAsAsked(SharedReference):
    """Claims one device until it is asked for more."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._shared = replace(self._shared, tensor_parallel=self.meeting.count)


def _plugin(kind: type[SharedReference]) -> Any:
    def create(device: Device, options: Mapping[str, Any], limits: Limits) -> Backend:
        return kind(limits)

    return stub_plugin(platform_create=create)


_FAULTS: Mapping[str, tuple[str, type[SharedReference], str]] = {
    "meets-at-once": ("B", _MeetsAtOnce, "a rank waits for the others when it is created"),
    "local-sum": ("B", _LocalSum, "all_reduce returns this rank's part"),
    "sums-from-itself": ("B", _FromItself, "each rank adds in an order of its own"),
    "sums-in-place": ("B", _InPlace, "all_reduce changes its argument"),
    "joins-rows": ("B", _JoinsRows, "all_gather joins along the first axis"),
    "times-zero": ("B", _TimesZero, "a shared embed multiplies others' rows by 0"),
    "wrong-slice": ("B", _WrongSlice, "a rank reads its neighbour's part of a weight"),
    "reads-everything": ("B", _ReadsAll, "every rank reads all of a weight"),
    "bytes-of-all": ("C", _WholeBytes, "a rank's kv_block_bytes counts every rank's heads"),
    "old-sum": ("D", _OldSum, "a replay returns the sum of the first run"),
    "keeps-what-it-joins": ("D", _Keeps, "keeps what each exchange returned"),
    "sums-in-turn": ("F", _ByTurn, "the order of a sum over the ranks changes from run to run"),
    "waits-to-close": ("G", _WaitsToClose, "close waits for the other ranks"),
    "as-many-as-asked": ("I", _AsManyAsAsked, "claims as many devices as it is asked for"),
}


def __getattr__(name: str) -> Any:
    """Makes the plugin that a probe or a rank names: `sound`, or a mutant's name."""
    if name == "sound":
        return _plugin(SharedReference)
    if name in _FAULTS:
        return _plugin(_FAULTS[name][1])
    raise AttributeError(name)


MUTANTS = [
    Mutant(name, group, summary, kind, plugin=f"{__name__}:{name}")
    for name, (group, kind, summary) in _FAULTS.items()
]

__all__ = ["MUTANTS", "Meeting", "SharedReference"]
