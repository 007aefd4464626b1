"""How K and V lie in device memory.

A layer is one array [num_blocks, block_size, heads * width]: the token is a row, and each KV head
owns `width` lanes of it, K in lanes [0, D) and V in lanes [D, 2D). Fusing K and V makes a head of
64 exactly the 128 lanes of a register; with D lanes on their own XLA picks another layout for the
cache and copies all of it before every kernel. Keeping the token a row makes a block one
contiguous stretch of memory, and the write of a token touch one row of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

LANES = 128
"""Elements a row of a vector register; the last axis of device memory is tiled by it."""

ROW_TILE = 8
"""Rows that a DMA moves at least: the second-last axis of device memory is tiled by it."""


def lane_width(head_dim: int) -> int:
    """Returns the lanes of one KV head: 2 * head_dim, rounded up to whole registers."""
    return -(-2 * head_dim // LANES) * LANES


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The KV cache of one layer.

    Attributes:
      data: [num_blocks, block_size, heads * width]; one rank's share inside a traced step.
      head_dim: D.
      num_kv_heads: KV heads of the model. There are more in `data` when there are more ranks
        than heads: each is then stored several times.
    """

    data: jax.Array
    head_dim: int = field(metadata={"static": True})
    num_kv_heads: int = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.data.shape[1]

    @property
    def num_stored_heads(self) -> int:
        """KV heads that `data` holds."""
        return self.data.shape[2] // lane_width(self.head_dim)

    def with_data(self, data: jax.Array) -> KVBlocks:
        """Returns the same layer over another array."""
        return KVBlocks(data, self.head_dim, self.num_kv_heads)
