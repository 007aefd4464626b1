"""Random numbers of a request: a pure function of its seed and of the output position.

The generator is Philox4x32-10, keyed by the request's 64-bit seed. Output position p is word p % 4
of counter p // 4, so that a draw depends on nothing else: not on the batch, the backend, the
schedule or what was drawn before.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Random123.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products do not overflow."""

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_DROPPED_BITS = np.uint64(8)
_ROUNDS = 10

WINDOW = 128
"""Positions that are drawn at once for a request; a multiple of 4."""


def philox4x32(counters: Words, keys: Words) -> Words:
    """Philox4x32-10.

    Args:
      counters: [4, N, M] words.
      keys: [2, N] words.

    Returns:
      [4, N, M] words.
    """
    multipliers, weyl = _MULTIPLIERS[:, None, None], _WEYL[:, None, None]
    even, odd, key = counters[::2], counters[1::2], keys[:, :, None]
    for _ in range(_ROUNDS):
        product = (even * multipliers)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ key, product & _MASK
        key = (key + weyl) & _MASK
    words = np.empty_like(counters)
    words[::2], words[1::2] = even, odd
    return words


def uniform_windows(seeds: Words, windows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Draws the uniforms of whole windows of output positions.

    Args:
      seeds: uint64 [N], the request's seed modulo 2**64.
      windows: [N]; window w holds positions [w * WINDOW, (w + 1) * WINDOW).

    Returns:
      float32 [N, WINDOW], multiples of 2**-24 in [0, 1).
    """
    num_counters = WINDOW // 4
    counters = np.zeros((4, len(seeds), num_counters), np.uint64)
    counters[0] = windows[:, None] * num_counters + np.arange(num_counters)
    words = philox4x32(counters, np.stack([seeds & _MASK, seeds >> _HALF]))
    bits = np.moveaxis(words, 0, -1).reshape(len(seeds), WINDOW) >> _DROPPED_BITS
    return bits.astype(np.float32) * np.float32(2.0**-24)
