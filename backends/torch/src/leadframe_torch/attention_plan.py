"""What paged attention needs from a batch, prepared once per step and `AttnParams`.

A batch becomes a few *groups*: rectangles of gathered keys with the mask of each query. Where the
device's lengths may be read, decodes of similar length share a group and each chunk is its own,
so that little of a rectangle is padding. Where nothing may be read, in a captured graph or a
traced step, there is one group of decodes and one of chunks, at the bucket's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams

_FILL = 0.75
"""A decode joins a group when it has at least this share of the group's longest block table."""


@dataclass(frozen=True, slots=True)
class Group:
    """Queries that attend to one rectangle of gathered keys.

    Attributes:
      tokens: which tokens of the batch, as a slice or int64 [n] indices.
      blocks: int64 [R * P], the gathered block ids; R is the number of rectangle rows.
      sees: bool [n, L] for decodes, L = P * block_size keys of its own row each (R == n);
        bool [n, R * L] for chunk tokens, which look at the keys of all rows.
      unread: bool [R * L], keys that no query of the group may be influenced by.
      is_decode: one query for each rectangle row.
    """

    tokens: slice | Tensor
    blocks: Tensor
    sees: Tensor
    unread: Tensor
    is_decode: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's slots and, for each block size that is asked for, its groups.

    Attributes:
      batch: the step's arrays.
      params: constants of the layers that use the plan.
      may_read: whether lengths may be read on the host; the groups then fit them.
      slots: int64 [T].
    """

    batch: StepArrays
    params: AttnParams
    may_read: bool
    slots: Tensor
    _groups: dict[int, tuple[Group, ...]] = field(default_factory=dict)

    def groups(self, block_size: int) -> tuple[Group, ...]:
        """Returns groups that cover every token exactly once; made at the first call.

        The block size is a property of the KV cache, which `plan` does not see.
        """
        if block_size not in self._groups:
            builder = _Builder(self.batch, self.params, block_size)
            made = builder.fitted() if self.may_read else builder.static()
            self._groups[block_size] = tuple(made)
        return self._groups[block_size]


def plan(batch: StepArrays, params: AttnParams, *, may_read: bool) -> AttentionPlan:
    """Prepares a batch for the layers with `params`."""
    return AttentionPlan(batch, params, may_read, batch.slots.long())


class _Builder:
    def __init__(self, batch: StepArrays, params: AttnParams, block_size: int) -> None:
        self.batch, self.bucket = batch, batch.bucket
        self.window, self.block_size = params.window, block_size
        self.table: Tensor = batch.block_table.long()

    def static(self) -> list[Group]:
        """Groups of the bucket's sizes: no tensor is read."""
        first, bucket = self.bucket.num_decodes, self.bucket
        groups = []
        if first:
            groups.append(self._decodes(slice(0, first), bucket.num_blocks))
        if bucket.num_tokens > first:
            rows = slice(min(first, bucket.num_seqs - 1), bucket.num_seqs)
            groups.append(self._chunks(slice(first, bucket.num_tokens), rows, bucket.num_blocks))
        return groups

    def fitted(self) -> list[Group]:
        """Groups that waste little; reads the lengths."""
        lens: list[int] = self.batch.seq_lens.tolist()
        starts: list[int] = self.batch.query_start.tolist()
        widths = [max(1, -(-n // self.block_size)) for n in lens]
        first, groups = self.bucket.num_decodes, []
        for members in _similar(widths[:first]):
            tokens: slice | Tensor = slice(0, first)
            if len(members) < first:
                tokens = torch.tensor(members, device=self.table.device)
            groups.append(self._decodes(tokens, max(widths[row] for row in members)))
        for row in range(first, self.bucket.num_seqs):
            if starts[row] < starts[row + 1]:
                tokens = slice(starts[row], starts[row + 1])
                groups.append(self._chunks(tokens, slice(row, row + 1), widths[row]))
        live = max(starts[-1], first)
        if live < self.bucket.num_tokens:  # padding tokens belong to no row
            groups.append(self._chunks(slice(live, self.bucket.num_tokens), slice(0, 1), 1))
        return groups

    def _decodes(self, tokens: slice | Tensor, width: int) -> Group:
        table = self.table[tokens, :width]
        lens = self.batch.seq_lens[tokens].unsqueeze(1)
        keys = self._keys(width)
        sees = keys < lens
        if self.window is not None:
            sees = sees & (keys >= lens - self.window)
        return Group(tokens, table.reshape(-1), sees, ~sees.reshape(-1), is_decode=True)

    def _chunks(self, tokens: slice, rows: slice, width: int) -> Group:
        """Tokens of one or more chunk rows against the keys of all those rows."""
        token = torch.arange(tokens.start, tokens.stop, device=self.table.device).unsqueeze(1)
        starts, ends = self.batch.query_start[:-1][rows], self.batch.query_start[1:][rows]
        lens, keys = self.batch.seq_lens[rows], self._keys(width)
        position = (token - ends + lens).unsqueeze(2)  # of each token, were it of each row
        is_own = ((token >= starts) & (token < ends)).unsqueeze(2)
        sees = is_own & (keys <= position) & (keys < lens.view(1, -1, 1))
        if self.window is not None:
            sees = sees & (keys > position - self.window)
        sees = sees.view(token.shape[0], -1)
        blocks = self.table[rows, :width].reshape(-1)
        return Group(tokens, blocks, sees, ~sees.any(dim=0), is_decode=False)

    def _keys(self, width: int) -> Tensor:
        return torch.arange(width * self.block_size, device=self.table.device)


def _similar(widths: list[int]) -> list[list[int]]:
    """Splits rows into groups whose block tables are about equally long."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(widths)), key=widths.__getitem__, reverse=True):
        if not groups or widths[row] < _FILL * longest - 1:
            groups.append([])
            longest = widths[row]
        groups[-1].append(row)
    return [sorted(rows) for rows in groups]
