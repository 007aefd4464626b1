"""Refuses what native kernels answer with a crashed process or a silently wrong result.

IPEX's kernels check almost nothing: a slot of -1 or past the cache corrupts the heap, a cache in
the other layout or an int64 table reads wild addresses, a row without keys divides by zero.
Everything here is checked before the call and raised as `ContractViolation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadframe.errors import ContractViolation
from leadframe.platform.batch import StepArrays, int_fields

_TABLES = ("query_start", "seq_lens", "block_table", "slots")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Live values of a batch whose arrays are on the host.

    Attributes:
      num_owned: tokens that belong to a row.
      max_query: the most tokens of a row, at least 1.
      max_len: the most keys of a row.
      max_slot: the largest slot.
      max_block: the largest block id of the tables.
      has_padded_decode: some decode row has seq_len 0.
    """

    num_owned: int
    max_query: int
    max_len: int
    max_slot: int
    max_block: int
    has_padded_decode: bool


def check_batch(batch: StepArrays) -> None:
    """Checks types and shapes; reads no value.

    Raises:
      ContractViolation: an array is not what `StepArrays` says.
    """
    shapes = dict(int_fields(batch.bucket))
    problems = []
    for name in _TABLES:
        array, shape = getattr(batch, name), shapes[name]
        if not isinstance(array, Tensor):
            problems.append(f"{name} is {type(array).__name__}; it must be a torch tensor")
        elif array.dtype != torch.int32:
            problems.append(f"{name} is {array.dtype}; the kernels read torch.int32")
        elif tuple(array.shape) != shape:
            problems.append(f"{name} has shape {tuple(array.shape)}; the bucket says {shape}")
        elif not array.is_contiguous():
            problems.append(f"{name} has gaps between its elements; it must be contiguous")
    _raise(problems, "the batch")


def read_facts(batch: StepArrays) -> HostFacts:
    """Reads and checks the values of a batch on the host.

    Raises:
      ContractViolation: a value that leads out of the cache or of another array.
    """
    starts, lens, table, slots = (getattr(batch, name).numpy() for name in _TABLES)
    queries, first = np.diff(starts), batch.bucket.num_decodes
    problems = []
    if slots.min(initial=0) < 0:
        where = int(slots.argmin())
        problems.append(f"slots[{where}] is {slots[where]}; padding uses slot 0, never -1")
    if table.min(initial=0) < 0:
        problems.append(f"block_table holds {table.min()}; unused entries are 0")
    if not np.array_equal(starts[: first + 1], np.arange(first + 1)):
        problems.append(
            f"query_start begins {starts[: first + 1].tolist()}; decode row i owns token i"
        )
    if queries.min(initial=0) < 0 or starts[-1] > batch.bucket.num_tokens:
        problems.append(f"query_start is {starts.tolist()} for {batch.bucket.num_tokens} tokens")
    bad = np.flatnonzero((lens < 0) | ((lens < queries) & (lens != 0)))
    if len(bad):
        row = int(bad[0])
        problems.append(f"seq_lens[{row}] is {lens[row]} for {queries[row]} tokens")
    _raise(problems, "the batch")
    return HostFacts(
        num_owned=int(starts[-1]),
        max_query=max(1, int(queries.max(initial=1))),
        max_len=int(lens.max(initial=0)),
        max_slot=int(slots.max(initial=0)),
        max_block=int(table.max(initial=0)),
        has_padded_decode=bool((lens[:first] == 0).any()),
    )


def check_cache(kv: Tensor, *, is_hnd: bool) -> None:
    """Checks a KV layer [2, N, block_size, K, D] against the layout that kernels read.

    Args:
      kv: the layer.
      is_hnd: kernels read [N, K, block_size, D] in memory; otherwise [N, block_size, K, D].

    Raises:
      ContractViolation: the memory is laid out in another way.
    """
    wanted = "[2, N, K, block_size, D]" if is_hnd else "[2, N, block_size, K, D]"
    if not isinstance(kv, Tensor) or kv.dim() != 5 or kv.shape[0] != 2:
        shape = tuple(getattr(kv, "shape", ())) or type(kv).__name__
        raise ContractViolation("a KV layer", [f"it is {shape}; it must come from kv_alloc"])
    if not (kv.transpose(2, 3) if is_hnd else kv).is_contiguous():
        raise ContractViolation(
            "a KV layer",
            [f"its strides are {kv.stride()}; these kernels read {wanted}, as kv_alloc makes it"],
        )


def check_append(kv: Tensor, k: Tensor, v: Tensor, num_slots: int, max_slot: int | None) -> None:
    """Checks K and V [T, K, D] against a cache that passed `check_cache`.

    Raises:
      ContractViolation: shapes or types differ, or a slot lies past the cache.
    """
    wanted = (num_slots, kv.shape[3], kv.shape[4])
    fits = k.shape == v.shape == torch.Size(wanted) and k.dtype == v.dtype == kv.dtype
    room = kv.shape[1] * kv.shape[2]
    if fits and (max_slot is None or max_slot < room):
        return
    problems = []
    for name, side in (("k", k), ("v", v)):
        if tuple(side.shape) != wanted:
            problems.append(f"{name} has shape {tuple(side.shape)}; it must be {wanted}")
        if side.dtype != kv.dtype:
            problems.append(f"{name} is {side.dtype}; the cache is {kv.dtype}")
    if max_slot is not None and max_slot >= room:
        problems.append(f"slot {max_slot} lies past the cache of {room} slots")
    _raise(problems, "kv_append")


def check_query(
    q: Tensor, kv: Tensor, num_tokens: int, num_blocks: int, facts: HostFacts | None
) -> None:
    """Checks q [T, H, D] and the batch's tables against a cache that passed `check_cache`.

    Raises:
      ContractViolation: shapes or types differ, or a table leads past the cache.
    """
    problems = []
    kv_heads, dim, block_size = kv.shape[3], kv.shape[4], kv.shape[2]
    if q.dim() != 3 or q.shape[0] != num_tokens or q.shape[2] != dim or q.shape[1] % kv_heads:
        wanted = f"({num_tokens}, a multiple of {kv_heads}, {dim})"
        problems.append(f"q has shape {tuple(q.shape)}; it must be {wanted}")
    if q.dtype != kv.dtype:
        problems.append(f"q is {q.dtype}; the cache is {kv.dtype}, and they must be the same")
    if facts is not None and facts.max_block >= kv.shape[1]:
        problems.append(f"block {facts.max_block} lies past the cache of {kv.shape[1]} blocks")
    if facts is not None and facts.max_len > num_blocks * block_size:
        room = num_blocks * block_size
        problems.append(f"a row has {facts.max_len} keys; its block table covers {room}")
    _raise(problems, "attention")


def _raise(problems: list[str], subject: str) -> None:
    if problems:
        raise ContractViolation(subject, problems)
