"""Blocks of KV memory: who holds which, which can be reused, how many there are."""

from leadframe.kv_cache.block_pool import NULL_BLOCK, BlockPool
from leadframe.kv_cache.capacity import (
    KVCapacity,
    blocks_for,
    capacity_of,
    fit_max_model_len,
    format_gib,
    kv_token_bytes,
)
from leadframe.kv_cache.manager import KVCacheManager

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "KVCacheManager",
    "KVCapacity",
    "blocks_for",
    "capacity_of",
    "fit_max_model_len",
    "format_gib",
    "kv_token_bytes",
]
