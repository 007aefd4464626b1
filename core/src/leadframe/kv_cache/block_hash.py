"""Hashes of full blocks: equal hashes mean equal tokens after equal prefixes for one tenant.

h[i] = SHA-256(h[i - 1] ‖ tokens of block i as little-endian int32 ‖ extra[i]). The digest is
collision-proof, so a hit is trusted without comparing tokens.

Source: vLLM v1/core/kv_cache_utils.py, idea only.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from leadframe.request import Request

_ROOT = sha256(b"leadframe prefix cache v1").digest()


def extra_keys(request: Request, block_index: int) -> bytes:
    """Returns what separates a block's content besides its tokens and its prefix.

    The cache salt enters in block 0 and so, through the chain, every later block. Whatever else
    changes K/V for the same tokens (an adapter, an image at an offset) belongs here.
    """
    if block_index or not request.cache_salt:
        return b""
    return b"salt:" + request.cache_salt.encode()


def extend_hashes(hashes: list[bytes], request: Request, num_blocks: int, block_size: int) -> None:
    """Appends the hashes of blocks [len(hashes), num_blocks) of a request.

    Args:
      hashes: of the leading blocks, in order; extended in place.
      request: knows at least `num_blocks * block_size` tokens.
      num_blocks: full blocks to cover.
      block_size: tokens per block.
    """
    first = len(hashes)
    if num_blocks <= first:
        return
    token_ids = request.token_ids(first * block_size, num_blocks * block_size)
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    stride = 4 * block_size
    parent = hashes[-1] if hashes else _ROOT
    for i in range(num_blocks - first):
        digest = sha256(parent)
        digest.update(data[i * stride : (i + 1) * stride])
        digest.update(extra_keys(request, first + i))
        parent = digest.digest()
        hashes.append(parent)
