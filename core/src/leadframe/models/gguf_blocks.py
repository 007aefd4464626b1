"""Quantised GGUF tensors as integers, scales and offsets, without dequantising them.

A backend that multiplies with small integers reads a fraction of the bytes, and its weights are
still exactly the float32 numbers that dequantising gives.

Source: the block layouts are those of ggml's `ggml-common.h`, read through `gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from gguf import quants

from leadframe.platform.backend import WeightBlocks

Bytes = npt.NDArray[np.uint8]
_Parts = tuple[npt.NDArray[np.int8], npt.NDArray[Any], npt.NDArray[Any] | None, Literal[4, 8]]
"""values [N, elements], scale [N, k], offset [N, k] or None, and bits, of N blocks."""


def weight_blocks(raw: Bytes, kind: str) -> WeightBlocks | None:
    """Splits rows of stored blocks.

    Args:
      raw: uint8 [rows, blocks a row * bytes a block].
      kind: the tensor type, such as "Q4_1".

    Returns:
      The matrix, or None if this type has no such form.
    """
    parser = _PARSERS.get(kind)
    if parser is None:
        return None
    block_bytes, parse = parser
    values, scale, offset, bits = parse(np.ascontiguousarray(raw).reshape(-1, block_bytes))
    rows = raw.shape[0]
    return WeightBlocks(
        values.reshape(rows, -1),
        scale.reshape(rows, -1),
        None if offset is None else offset.reshape(rows, -1),
        bits,
    )


def _halves(packed: Bytes, width: int) -> Bytes:
    """Low then high nibbles of every `width` bytes: [N, bytes] to [N, 2 * bytes]."""
    grouped = packed.reshape(len(packed), -1, 1, width)
    shifted = grouped >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (shifted & np.uint8(0x0F)).reshape(len(packed), -1)


def _f16(packed: Bytes) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(packed).view(np.float16)


def _fifth_bits(packed: Bytes) -> Bytes:
    """One bit an element from 4 bytes: [N, 4] to [N, 32], as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> _Parts:
    scale = _f16(blocks[:, :2]).astype(np.float32)
    return _halves(blocks[:, 2:], 16).astype(np.int8), scale, scale * np.float32(-8), 4


def _q4_1(blocks: Bytes) -> _Parts:
    scale, offset = _f16(blocks[:, :2]), _f16(blocks[:, 2:4])
    return _halves(blocks[:, 4:], 16).astype(np.int8), scale, offset, 4


def _q5_0(blocks: Bytes) -> _Parts:
    values = _halves(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return values.astype(np.int8) - np.int8(16), _f16(blocks[:, :2]), None, 8


def _q5_1(blocks: Bytes) -> _Parts:
    values = _halves(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    scale, offset = (_f16(blocks[:, at : at + 2]).astype(np.float32) for at in (0, 2))
    return values.astype(np.int8), scale, offset, 8


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), _f16(blocks[:, :2]), None, 8


def _k_scales(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets [N, 8] of the sub-blocks of a Q4_K or Q5_K block."""
    scale, least = (_f16(blocks[:, at : at + 2]).astype(np.float32) for at in (0, 2))
    scales, mins = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return scale * scales.astype(np.float32), -(least * mins.astype(np.float32))


def _q4_k(blocks: Bytes) -> _Parts:
    return _halves(blocks[:, 16:], 32).astype(np.int8), *_k_scales(blocks), 4


def _q5_k(blocks: Bytes) -> _Parts:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) << np.uint8(4)
    values = _halves(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1)
    return values.astype(np.int8), *_k_scales(blocks), 8


def _q6_k(blocks: Bytes) -> _Parts:
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(len(blocks), -1, 1, 32) >> shifts) & np.uint8(3)
    values = _halves(blocks[:, :128], 64) | (high.reshape(len(blocks), -1) << np.uint8(4))
    scale = _f16(blocks[:, 208:]).astype(np.float32)
    scales = scale * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return values.astype(np.int8) - np.int8(32), scales, None, 8


_PARSERS: Final[dict[str, tuple[int, Callable[[Bytes], _Parts]]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
