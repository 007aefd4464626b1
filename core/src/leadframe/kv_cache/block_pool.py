"""The block pool: which blocks are free, who holds the others, and which are worth finding again.

Knows block ids and hashes. Must not know requests, tokens or devices.

Every block is in exactly one state:

- held: its ref count is the number of block tables that contain it;
- free and cached: nobody holds it, its content can still be found by hash, and it is reused only
  after every block that was freed before it;
- free and uncached: reused first.

Source: PagedAttention, Kwon et al. 2023; the free queue follows vLLM v1/core/block_pool.py, idea
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from leadframe.errors import InternalError

NULL_BLOCK = 0
"""The block that padding writes to. It is never handed out."""


class BlockPool:
    """Blocks 1 to num_blocks - 1, with ref counts, a free queue and a hash index.

    The free queue is a circular list through two arrays of links, so that taking, freeing and
    reviving a block from its middle are all O(1). The null block is the list's sentinel, which is
    why it can never be taken.

    Attributes:
      num_blocks: blocks of the pool, the null block included.
      num_free: blocks that nobody holds.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InternalError(f"a block pool of {num_blocks} blocks; it needs at least 2")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash, held or free."""
        return len(self._cached)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds a block."""
        return self._ref_counts[block_id] == 0

    def take(self, count: int) -> list[int]:
        """Takes the `count` blocks that are reused first, dropping what was cached in them.

        Raises:
          InternalError: fewer are free; the caller has to ask `num_free` before.
        """
        if count > self.num_free:
            raise InternalError(f"{count} blocks taken from a pool with {self.num_free} free")
        taken = []
        block_id = self._next[NULL_BLOCK]
        for _ in range(count):
            self.forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
            block_id = self._next[block_id]
        self._link(NULL_BLOCK, block_id)
        self.num_free -= count
        return taken

    def acquire(self, block_id: int) -> None:
        """Holds a block once more; one that was free leaves the free queue."""
        if self._ref_counts[block_id] == 0:
            self._link(self._previous[block_id], self._next[block_id])
            self.num_free -= 1
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drops one hold. The last one frees the block.

        A cached block goes to the end of the free queue; an uncached one, which nobody can use
        again, to its front.

        Raises:
          InternalError: nobody holds it.
        """
        if block_id == NULL_BLOCK or self._ref_counts[block_id] == 0:
            raise InternalError(f"block {block_id} is freed, and nobody holds it")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        if self._hashes[block_id] is None:
            before, after = NULL_BLOCK, self._next[NULL_BLOCK]
        else:
            before, after = self._previous[NULL_BLOCK], NULL_BLOCK
        self._link(before, block_id)
        self._link(block_id, after)
        self.num_free += 1

    def lookup(self, block_hash: bytes) -> int | None:
        """Returns the block that holds the content with this hash, held or free."""
        return self._cached.get(block_hash)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Lets a held block, whose content is complete, be found by hash.

        Does nothing if another block has the same content already: block tables are append-only,
        so a duplicate stays with its request and is not found.
        """
        if self._hashes[block_id] is None and block_hash not in self._cached:
            self._hashes[block_id] = block_hash
            self._cached[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """Makes a block impossible to find by hash; who holds it keeps it."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None

    def forget_all(self) -> None:
        """Makes every block impossible to find by hash."""
        self._cached.clear()
        self._hashes = [None] * self.num_blocks

    def free_blocks(self) -> Iterator[int]:
        """Yields the free blocks, the one that is reused first at the front."""
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def check(self, holders: Mapping[int, int]) -> None:
        """Recomputes every invariant from scratch.

        Args:
          holders: block id → number of block tables that contain it.

        Raises:
          InternalError: one does not hold.
        """
        free = list(self.free_blocks())
        for block_id in [NULL_BLOCK, *free]:
            if self._previous[self._next[block_id]] != block_id:
                raise InternalError(f"the free queue is torn after block {block_id}")
        if len(free) != self.num_free or len(set(free)) != len(free):
            raise InternalError(f"the free queue has {len(free)} blocks, counted {self.num_free}")
        if self._ref_counts[NULL_BLOCK] or NULL_BLOCK in holders:
            raise InternalError("the null block is held")
        for block_id in range(1, self.num_blocks):
            expected = holders.get(block_id, 0)
            if self._ref_counts[block_id] != expected:
                found = self._ref_counts[block_id]
                raise InternalError(f"block {block_id}: ref count {found}, in {expected} tables")
        if {b for b in range(1, self.num_blocks) if self._ref_counts[b] == 0} != set(free):
            raise InternalError("the free queue is not the set of blocks that nobody holds")
        self._check_index()

    def _check_index(self) -> None:
        by_block = {b: h for b, h in enumerate(self._hashes) if h is not None}
        if by_block != {b: h for h, b in self._cached.items()} or NULL_BLOCK in by_block:
            raise InternalError("the hash index and the blocks' own hashes differ")

    def _link(self, before: int, after: int) -> None:
        self._next[before] = after
        self._previous[after] = before
