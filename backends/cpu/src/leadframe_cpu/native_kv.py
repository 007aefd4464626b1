"""The KV cache of the native attention kernel: keys transposed, values in rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from leadframe_torch.dtypes import zeros

GROUP: Final = 16
"""Keys that the kernel scores at a time: a block is a whole number of groups."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeKV:
    """One layer.

    Attributes:
      data: [num_blocks, kv_heads, block_size * (head_dim + padded head_dim)]; per block and head
        keys [head_dim, block_size], then values [block_size, padded head_dim].
      block_size: tokens a block.
      head_dim: elements a head.
    """

    data: Tensor
    block_size: int
    head_dim: int

    @staticmethod
    def row_elements(block_size: int, head_dim: int) -> int:
        """Elements of one block of one head, padding included."""
        return block_size * (head_dim + -(-head_dim // GROUP) * GROUP)

    @staticmethod
    def allocate(
        num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> NativeKV:
        """Allocates zeroed blocks."""
        size = NativeKV.row_elements(block_size, head_dim)
        data = zeros((num_blocks, kv_heads, size), dtype, torch.device("cpu"))
        return NativeKV(data, block_size, head_dim)

    @property
    def keys(self) -> Tensor:
        """A view [num_blocks, block_size, kv_heads, head_dim]."""
        blocks, heads, _ = self.data.shape
        part = self.data[..., : self.block_size * self.head_dim]
        split = part.view(blocks, heads, self.head_dim, self.block_size)
        return split.permute(0, 3, 1, 2)

    @property
    def values(self) -> Tensor:
        """A view [num_blocks, block_size, kv_heads, head_dim]."""
        blocks, heads, _ = self.data.shape
        part = self.data[..., self.block_size * self.head_dim :]
        split = part.view(blocks, heads, self.block_size, -1)
        return split[..., : self.head_dim].transpose(1, 2)
