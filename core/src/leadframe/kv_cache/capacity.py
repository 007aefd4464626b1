"""KV arithmetic: bytes, blocks, tokens, and what fits. Pure functions of integers.

The engine, the capacity line and every calculator use this module, so that they cannot disagree.
One block, the null block, is reserved: memory holds `num_blocks` blocks, and requests get
`num_usable_blocks`, one less. Every figure that is shown is of usable blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leadframe.errors import ConfigError
from leadframe.platform.backend import KVLayerSpec

_GIB = 2**30


def kv_token_bytes(layers: Sequence[KVLayerSpec], element_bytes: int) -> int:
    """Returns the bytes of one token's K and V over all layers, without a backend's padding."""
    return sum(2 * layer.num_kv_heads * layer.head_dim * element_bytes for layer in layers)


def format_gib(num_bytes: int) -> str:
    """Returns bytes as people read them, such as "1.23 GiB"."""
    return f"{num_bytes / _GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """A KV cache of a certain size.

    Attributes:
      num_blocks: blocks in memory, the null block included.
      block_size: tokens per block.
      block_bytes: device bytes of one block over all layers, padding included.
    """

    num_blocks: int
    block_size: int
    block_bytes: int

    def steadied(self) -> KVCapacity:
        """Returns the same with fewer blocks, by 0.8 % at most: of their number, 8 bits stay.

        So the size is the same at the next start, though a few bytes more may be free then.
        """
        spare = max(0, self.num_blocks.bit_length() - 8)
        return replace(self, num_blocks=self.num_blocks >> spare << spare)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can get."""
        return max(0, self.num_blocks - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can have in the cache, and the longest sequence that fits."""
        return self.num_usable_blocks * self.block_size

    @property
    def usable_bytes(self) -> int:
        """Device bytes of the usable blocks."""
        return self.num_usable_blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Device bytes of all blocks, the null block included."""
        return self.num_blocks * self.block_bytes

    def max_concurrency(self, max_model_len: int) -> float:
        """Returns how many requests of `max_model_len` tokens fit at once."""
        return self.num_usable_blocks / blocks_for(max_model_len, self.block_size)

    def line(self, max_model_len: int, ranks: int = 1) -> str:
        """Returns the capacity line, the one that operators search the log for.

        Args:
          max_model_len: longest sequence served.
          ranks: devices that the bytes are spread over; they are counted over all of them.
        """
        over = f" over {ranks} ranks" if ranks > 1 else ""
        concurrency = self.max_concurrency(max_model_len)
        return (
            f"KV cache: {self.num_usable_blocks:,} blocks × {self.block_size:,} tokens = "
            f"{self.num_tokens:,} tokens ({format_gib(self.usable_bytes)}{over}); maximum "
            f"concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x"
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def capacity_of(available_bytes: int, block_size: int, block_bytes: int) -> KVCapacity:
    """Returns the largest KV cache that fits `available_bytes`, null block included."""
    return KVCapacity(max(0, available_bytes) // block_bytes, block_size, block_bytes)


def useful_capacity(capacity: KVCapacity, max_num_seqs: int, max_model_len: int) -> KVCapacity:
    """Drops blocks that no schedule could use: every row at its longest, twice over.

    The second half keeps finished prefixes for reuse.
    """
    most = 2 * max_num_seqs * blocks_for(max_model_len, capacity.block_size) + 1
    return KVCapacity(min(most, capacity.num_blocks), capacity.block_size, capacity.block_bytes)


def check_max_model_len(asked: int | None, model_limit: int) -> None:
    """Checks that a model has as many positions as the user wants.

    Raises:
      ConfigError: it has fewer.
    """
    if asked is not None and asked > model_limit:
        raise ConfigError(
            f"--max-model-len is {asked}, and the model serves at most {model_limit} positions; "
            "lower it"
        )


def fit_max_model_len(capacity: KVCapacity, asked: int | None, model_limit: int) -> int:
    """Returns the longest sequence to serve.

    Args:
      capacity: the KV cache.
      asked: what the user wants, or None for as much as possible.
      model_limit: the model's own limit, which `check_max_model_len` has looked at.

    Raises:
      ConfigError: what was asked for does not fit, or nothing does; the message has every number.
    """
    wanted = model_limit if asked is None else asked
    if wanted <= capacity.num_tokens:
        return wanted
    if asked is None and capacity.num_usable_blocks:
        return capacity.num_tokens
    raise ConfigError(_too_small(capacity, wanted))


def _too_small(capacity: KVCapacity, wanted: int) -> str:
    needed = blocks_for(wanted, capacity.block_size) + 1
    advice = "raise --gpu-memory-utilization or --kv-cache-memory-bytes"
    if capacity.num_tokens:
        advice += f", or lower --max-model-len to at most {capacity.num_tokens:,}"
    return (
        f"one sequence of {wanted:,} tokens does not fit the KV cache: it needs {needed:,} blocks "
        f"of {capacity.block_size:,} tokens, the null block included, {needed:,} × "
        f"{capacity.block_bytes:,} bytes = {format_gib(needed * capacity.block_bytes)} "
        f"({needed * capacity.block_bytes:,} bytes); there is room for {capacity.num_blocks:,} "
        f"blocks ({capacity.total_bytes:,} bytes, {capacity.num_tokens:,} tokens); {advice}"
    )
