"""Sums and joins tensors over the ranks of a tensor-parallel group.

Each rank is a process with a backend of its own. They meet in a file of a private directory, so
that nobody else can join, and talk through the library that torch prefers for the device: gloo,
on the loopback interface alone, for a host; NCCL or RCCL for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from leadframe.errors import DeviceLost
from leadframe_torch.weights import Rank

_TIMEOUT: Final = timedelta(minutes=10)
"""How long a rank waits for the others inside a step: one of them may be compiling."""
_LOOPBACK: Final = "127.0.0.1"
_FILE: Final = "ranks"

Op = Callable[..., Any]


class Collectives:
    """What one rank does together with the others.

    The ranks connect at the first use: until then a rank that fails leaves nobody waiting.

    Args:
      rank: this rank.
      device: where its tensors are.
    """

    def __init__(self, rank: Rank, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks.

        On a host an element's sum depends on nothing but what is added: gloo's own order depends
        on where in the buffer the element stands, and so on who else is in the batch. A GPU's
        library adds in the order that it chooses.
        """
        if self._device.type == "cpu":
            return _sum_in_order(self._gathered(x.reshape(1, -1))).view(x.shape)
        total = x.clone(memory_format=torch.contiguous_format)
        with self._lost_peers():
            self._connected().allreduce([total]).wait()
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenation of x over the ranks along the last axis."""
        count = self._rank.count
        joined = self._gathered(x.reshape(-1, x.shape[-1]))
        whole = joined.view(count, *x.shape).movedim(0, -2)
        return whole.reshape(*x.shape[:-1], count * x.shape[-1])

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows [N, E] of every rank, one rank after the other: [ranks * N, E]."""
        rows = rows.contiguous()
        joined = rows.new_empty((self._rank.count * rows.shape[0], rows.shape[1]))
        with self._lost_peers():
            self._connected()._allgather_base(joined, rows).wait()
        return joined

    def shared_embed(self, embed: Op) -> Op:
        """Makes an `embed` of tables whose vocabulary the ranks share.

        Args:
          embed: the op for a whole table.
        """
        index, count = self._rank.index, self._rank.count

        def embed_share(table: Any, token_ids: Tensor) -> Tensor:
            """Rows of table [V, E], of which this rank holds a share, at int32 [T]."""
            share = table.shape[0]
            local = token_ids.clamp(0, share * count - 1) - index * share
            is_mine = (local >= 0) & (local < share)
            rows = embed(table, local.clamp(0, share - 1))
            return self.all_reduce(rows.masked_fill(~is_mine.unsqueeze(1), 0.0))

        return embed_share

    def close(self) -> None:
        """Leaves the group, without waiting: ranks which still wait for this one fail."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _connected(self) -> Any:
        if self._group is None:
            self._group = self._connect()
        return self._group

    def _connect(self) -> Any:
        count, index = self._rank.count, self._rank.index
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(Path(self._rank.rendezvous, _FILE)), count)
        name = distributed.get_default_backend_for_device(self._device)
        library: Any = getattr(distributed, "ProcessGroupGloo" if name == "gloo" else _class(name))
        options = library._Options() if name == "gloo" else library.Options()
        if name == "gloo":
            options._devices = [library.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        return library(store, index, count, options)

    def _lost_peers(self) -> _LostPeers:
        return _LostPeers(self._rank)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum of parts [ranks, N], first to last: the same on every rank and at every place."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _class(name: str) -> str:
    """The class of torch's group over a vendor's library, such as "nccl"."""
    return f"ProcessGroup{name.upper()}"


class _LostPeers:
    """Turns what a library says of peers that are gone into the contract's error."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raises DeviceLost for a RuntimeError."""
        if isinstance(error, RuntimeError):
            rank = self._rank
            raise DeviceLost(
                f"rank {rank.index} of {rank.count} cannot reach the others: {error}"
            ) from error
