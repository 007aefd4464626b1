"""The KV cache manager: which blocks each request has, and which it can reuse.

Knows requests and the block pool. Must not know devices, steps or queues.

A block is published to the prefix cache when the K/V of all its tokens has been computed
(`commit`), never when it is allocated: a step that fails leaves nothing wrong to be found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from leadframe.errors import InternalError
from leadframe.kv_cache.block_hash import extend_hashes
from leadframe.kv_cache.block_pool import BlockPool
from leadframe.kv_cache.block_tables import BlockTables
from leadframe.request import Request


@dataclass(slots=True)
class _Holding:
    """What is known of one request.

    Attributes:
      hashes: of its full blocks, as far as they were needed.
      num_committed: leading blocks whose tokens are all computed.
      num_announced: leading blocks that were known at admission; those that are not committed
        are being computed.
      may_publish: its K/V belongs to the weights of today.
    """

    request: Request
    hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    num_announced: int = 0
    may_publish: bool = True


class KVCacheManager:
    """Block tables over a pool, with prefix reuse.

    Args:
      num_blocks: blocks of the pool, the null block included.
      block_size: tokens per block.
      enable_prefix_caching: find and publish full blocks by hash.

    Attributes:
      table_rows: request id → its row of `block_tables`, for requests that hold blocks.
      prefix_queries: tokens of the requests that were admitted for the first time.
      prefix_hits: of those, tokens that the prefix cache served.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.table_rows: dict[str, int] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._pool = BlockPool(num_blocks)
        self._tables = BlockTables()
        self._holdings: dict[str, _Holding] = {}
        self._computing: Counter[bytes] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can get: the null block is not one of them."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; cached ones count."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests hold, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_usable

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """int32 [rows, width]: the table of each of `table_rows`; read it, do not keep it."""
        return self._tables.ids

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> npt.NDArray[np.int32]:
        """Returns the blocks of a request in token order: a view, empty if it holds none."""
        row = self.table_rows.get(request.request_id)
        return np.empty(0, np.int32) if row is None else self._tables.view(row)

    def match_prefix(self, request: Request) -> int:
        """Returns how many leading tokens have their K/V in the cache.

        Whole blocks, and fewer than all tokens: the last one is always computed, for its logits.
        Takes nothing.
        """
        if not self.enable_prefix_caching:
            return 0
        num_hits = 0
        for block_hash in self._prefix_hashes(request):
            if self._pool.lookup(block_hash) is None:
                break
            num_hits += 1
        return num_hits * self.block_size

    def is_being_computed(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether the block after the cached ones is one that a running request is computing.

        Args:
          request: one that holds no blocks.
          num_cached_tokens: what `match_prefix` returned.
        """
        if not self._computing:
            return False
        hashes = self._prefix_hashes(request)
        index = num_cached_tokens // self.block_size
        return index < len(hashes) and hashes[index] in self._computing

    def admit(self, request: Request, num_cached_tokens: int, num_reserved: int = 0) -> bool:
        """Gives a request blocks for all the tokens it knows, reusing cached ones.

        Args:
          request: one that holds no blocks.
          num_cached_tokens: what `match_prefix` returned, or 0 to reuse nothing.
          num_reserved: blocks that must stay free.

        Returns:
          False if there is not enough room; nothing has changed then.
        """
        holding = self._holding(request)
        reused = self._lookup_all(holding.hashes[: num_cached_tokens // self.block_size])
        num_new = self.blocks_for(request.num_tokens) - len(reused)
        num_revived = sum(map(self._pool.is_free, reused))
        if num_new + num_revived + num_reserved > self._pool.num_free:
            return False
        for block_id in reused:
            self._pool.acquire(block_id)
        row = self._tables.claim(reused + self._pool.take(num_new))
        self.table_rows[request.request_id] = row
        holding.num_committed = len(reused)
        if self.enable_prefix_caching:
            self._extend_hashes(holding, request.num_tokens)
            holding.num_announced = len(holding.hashes)
            self._computing.update(holding.hashes[len(reused) :])
        if not request.num_preemptions:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += num_cached_tokens
        return True

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Makes an admitted request's table cover `num_new_tokens` beyond its computed ones.

        Returns:
          False if there is not enough room; nothing has changed then.
        """
        row = self.table_rows[request.request_id]
        needed = self.blocks_for(request.num_computed_tokens + num_new_tokens)
        missing = needed - self._tables.lengths[row]
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self._tables.extend(row, self._pool.take(missing))
        return True

    def commit(self, request: Request) -> None:
        """Publishes the blocks of an admitted request whose tokens are all computed."""
        if not self.enable_prefix_caching:
            return
        holding = self._holdings[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if num_full <= holding.num_committed:
            return
        self._extend_hashes(holding, request.num_computed_tokens)
        self._retract(holding, num_full)
        if holding.may_publish:
            new = slice(holding.num_committed, num_full)
            block_ids = self.block_ids(request)[new].tolist()
            for block_id, block_hash in zip(block_ids, holding.hashes[new], strict=True):
                self._pool.publish(block_id, block_hash)
        holding.num_committed = num_full

    def free(self, request: Request, *, discard: bool = False) -> list[int]:
        """Takes all blocks from a request, the last ones first; harmless if it has none.

        Args:
          request: any request.
          discard: its K/V may be wrong (its logits were not finite): none of its blocks can be
            found in the cache any more.

        Returns:
          With `discard`, the blocks that nobody holds now and that must be scrubbed before they
          are used again; else nothing.
        """
        holding = self._holdings.pop(request.request_id, None)
        row = self.table_rows.pop(request.request_id, None)
        if holding is None or row is None:
            return []
        self._retract(holding, holding.num_announced)
        block_ids = self._tables.release(row)
        for block_id in reversed(block_ids):
            if discard:
                self._pool.forget(block_id)
            self._pool.release(block_id)
        return [b for b in block_ids if self._pool.is_free(b)] if discard else []

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, for when weights change.

        Requests that hold blocks keep them and publish nothing any more.
        """
        self._pool.forget_all()
        self._computing.clear()
        for request_id in self.table_rows:
            holding = self._holdings[request_id]
            holding.may_publish, holding.num_announced = False, 0

    def check(self) -> None:
        """Recomputes every invariant from scratch.

        Raises:
          InternalError: one does not hold.
        """
        admitted = [self._holdings[request_id] for request_id in self.table_rows]
        holders = Counter(int(b) for h in admitted for b in self.block_ids(h.request))
        self._pool.check(holders)
        if self._tables.ids.astype(bool).sum() != sum(holders.values()):
            raise InternalError("a block table has entries past its end")
        if len(set(self.table_rows.values())) != len(admitted):
            raise InternalError("two requests share a row of the block tables")
        for holding in admitted:
            self._check_holding(holding)
        announced = [h.hashes[h.num_committed : h.num_announced] for h in admitted]
        if self._computing != Counter(chain.from_iterable(announced)):
            raise InternalError("the blocks being computed are not those of the running requests")

    def _check_holding(self, holding: _Holding) -> None:
        request, table = holding.request, self.block_ids(holding.request)
        name = f"request {request.request_id}"
        if len(set(table.tolist())) != len(table):
            raise InternalError(f"{name} has a block twice")
        if len(table) < self.blocks_for(request.num_computed_tokens):
            raise InternalError(
                f"{name} has computed more tokens than its {len(table)} blocks hold"
            )
        if self.enable_prefix_caching:
            if holding.num_committed != request.num_computed_tokens // self.block_size:
                raise InternalError(f"{name} has full blocks that were not committed")
            fresh: list[bytes] = []
            extend_hashes(fresh, request, len(holding.hashes), self.block_size)
            if fresh != holding.hashes:
                raise InternalError(f"{name} has hashes that are not those of its tokens")

    def _holding(self, request: Request) -> _Holding:
        holding = self._holdings.get(request.request_id)
        if holding is None:
            holding = self._holdings[request.request_id] = _Holding(request)
        return holding

    def _prefix_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that a request may reuse: all before its last token."""
        holding = self._holding(request)
        self._extend_hashes(holding, request.num_tokens - 1)
        return holding.hashes[: (request.num_tokens - 1) // self.block_size]

    def _extend_hashes(self, holding: _Holding, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        extend_hashes(holding.hashes, holding.request, num_full, self.block_size)

    def _lookup_all(self, hashes: list[bytes]) -> list[int]:
        found = [self._pool.lookup(block_hash) for block_hash in hashes]
        block_ids = [block_id for block_id in found if block_id is not None]
        if len(block_ids) != len(hashes):
            raise InternalError("a request is admitted with cached blocks that are gone")
        return block_ids

    def _retract(self, holding: _Holding, end: int) -> None:
        """Blocks before `end` are not being computed any more by this request."""
        for block_hash in holding.hashes[holding.num_committed : min(end, holding.num_announced)]:
            self._computing[block_hash] -= 1
            if not self._computing[block_hash]:
                del self._computing[block_hash]
