"""Rank 0's backend as the backend of all ranks: what is asked of it, every rank does.

Sizes are sums over the ranks, each counted as the one with the least room: what the core plans
with them fits every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.engine.ranks.group import RankGroup, head_parts
from leadframe.errors import DeviceOOM
from leadframe.platform.backend import (
    KV,
    Array,
    Backend,
    CompiledStep,
    KVLayer,
    KVSpec,
    Partition,
    StepFunction,
    WeightRole,
    WeightSource,
)
from leadframe.platform.batch import Bucket, StepBatch
from leadframe.platform.capabilities import Capabilities
from leadframe.platform.info import MemoryInfo


class RankedStep:
    """A compiled step of every rank.

    Attributes:
      bytes: over all ranks.
      compile_seconds: of the slowest rank.
      capture_seconds: of the slowest rank.
      cache_hit: of rank 0.
    """

    def __init__(
        self,
        key: int,
        step: CompiledStep,
        others: Sequence[Mapping[str, Any]],
        backend: RankedBackend,
    ) -> None:
        self._key, self._step = key, step
        self._backend, self._group = backend, backend.group

        def most(name: str) -> Any:
            return max(getattr(step, name), *(other[name] for other in others))

        self.bytes: int = self._group.count * most("bytes")
        self.compile_seconds: float = most("compile_seconds")
        self.capture_seconds: float = most("capture_seconds")
        self.cache_hit = step.cache_hit

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Array], KV]:
        """Runs the step on every rank; rank 0's outputs are those of all."""
        live = (batch.live_tokens, batch.live_seqs, batch.max_seq_len)
        arrays = (batch.ints, batch.floats)
        self._group.send("run", {"step": self._key, "live": live}, arrays)
        with self._group.together():
            outputs, kv = self._step.run(batch, kv_d)
        self._backend.note_kv(kv)
        return outputs, kv

    def close(self) -> None:
        """Frees the step on every rank."""
        self._group.tell("close_step", {"step": self._key})
        self._step.close()


class RankedBackend:
    """Serves one model on the devices of a group.

    Args:
      backend: rank 0's.
      group: the other ranks.
    """

    def __init__(self, backend: Backend, group: RankGroup) -> None:
        self._backend, self.group = backend, group
        self._keys = itertools.count()
        self._spec: KVSpec | None = None
        self._layers: KV = []

    # --- facts ----------------------------------------------------------------------------

    @property
    def caps(self) -> Capabilities:
        """Those of each rank."""
        return self._backend.caps

    @property
    def xp(self) -> Any:
        """Rank 0's."""
        return self._backend.xp

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Rank 0's: an op that ranks do together must run inside a step."""
        return self._backend.ops

    # --- memory ---------------------------------------------------------------------------

    def memory(self) -> MemoryInfo:
        """Reads every device: the least room and the most use, times the ranks."""
        self.group.send("memory")
        all_ranks = [self._backend.memory()]
        all_ranks += [MemoryInfo(**reply.fields) for reply in self.group.collect()]
        count = self.group.count
        return MemoryInfo(
            total=count * min(info.total for info in all_ranks),
            free=count * min(info.free for info in all_ranks),
            used=count * max(info.used for info in all_ranks),
            peak=count * max(info.peak for info in all_ranks),
        )

    def load(self, upload_own: Callable[[], Mapping[str, Array]]) -> Mapping[str, Array]:
        """Loads weights on every rank at once.

        Args:
          upload_own: loads rank 0's.
        """
        self.group.send("load")
        weights = upload_own()
        self.group.collect()
        return weights

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies rank 0's part: the others read their own; see `load`."""
        return self._backend.upload(source, dtype, partition, role)

    def download(self, array: Array) -> npt.NDArray[Any]:
        """Copies rank 0's array to the host."""
        with self.group.together():
            return self._backend.download(array)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Bytes of a block on all ranks together; heads that several hold count each time."""
        return self.group.count * self._backend.kv_block_bytes(spec)

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates on every rank, or on none."""
        self.group.send("kv_alloc", {"spec": dataclasses.asdict(spec), "blocks": num_blocks})
        own: KV | None = None
        try:
            own = self._backend.kv_alloc(spec, num_blocks)
        except DeviceOOM as error:
            with suppress(DeviceOOM):  # it does not matter whether others had room
                self.group.collect()
            raise self._undo(error) from error
        try:
            self.group.collect()
        except DeviceOOM as error:
            self._backend.kv_free(own)
            raise self._undo(error) from error
        self._spec, self._layers = spec, list(own)
        return own

    def _undo(self, error: DeviceOOM) -> DeviceOOM:
        self.group.tell("kv_free")
        count = self.group.count
        return DeviceOOM(count * error.requested, count * error.free, error.phase)

    def note_kv(self, kv: KV) -> None:
        """Takes note of the handles that a step returned."""
        self._layers = list(kv)

    def kv_free(self, kv_d: KV) -> None:
        """Frees the KV cache of every rank."""
        self.group.tell("kv_free")
        self._layers = []
        self._backend.kv_free(kv_d)

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Reads blocks of every rank and joins their heads."""
        index, ids = self._index(layer), [int(block) for block in block_ids]
        self.group.send("kv_read", {"layer": index, "blocks": ids})
        parts = [self._backend.kv_read(layer, ids)]
        parts += [reply.arrays[0] for reply in self.group.collect()]
        heads = self._heads(index)
        first_of = {part.start: rank for rank, part in reversed(list(enumerate(heads)))}
        return np.concatenate([parts[rank] for _, rank in sorted(first_of.items())], axis=3)

    def kv_write(
        self, layer_d: KVLayer, block_ids: Sequence[int], data: npt.NDArray[Any]
    ) -> KVLayer:
        """Writes blocks on every rank, to each its heads."""
        index, ids = self._index(layer_d), [int(block) for block in block_ids]
        heads = self._heads(index)

        def part(rank: int) -> npt.NDArray[Any]:
            return data[:, :, :, heads[rank]]

        fields = {"layer": index, "blocks": ids}
        self.group.send_each("kv_write", lambda rank: (fields, [part(rank)]))
        written = self._backend.kv_write(layer_d, ids, part(0))
        self._layers[index] = written
        return written

    def _index(self, layer: KVLayer) -> int:
        return next(i for i, known in enumerate(self._layers) if known is layer)

    def _heads(self, index: int) -> Sequence[slice]:
        assert self._spec is not None
        return head_parts(self._spec.layers[index].num_kv_heads, self.group.count)

    # --- steps ----------------------------------------------------------------------------

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Makes the step ready on every rank; each uses the step and weights that it has."""
        key = next(self._keys)
        fields = {"step": key, "bucket": dataclasses.asdict(bucket), "capture": capture}
        self.group.send("compile", fields)
        with self.group.together():
            own = self._backend.compile(step, bucket, weights, kv, capture=capture)
        others = [reply.fields for reply in self.group.collect()]
        return RankedStep(key, own, others, self)

    def close(self) -> None:
        """Ends the other ranks and frees this one."""
        self.group.close(leave=self._backend.close)


__all__ = ["RankedBackend", "RankedStep"]
