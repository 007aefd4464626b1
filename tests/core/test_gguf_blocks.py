"""Quantised blocks against `gguf`'s own dequantisation, bit for bit."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from leadframe.models.gguf_blocks import weight_blocks

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def _stored(kind, rows=5, blocks=3):
    """Random blocks whose half-precision fields are ordinary numbers."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    halves = {"Q6_K": [208], "Q5_0": [0], "Q4_0": [0], "Q8_0": [0]}.get(kind, [0, 2])
    for at in halves:
        raw[:, at : at + 2] = rng.normal(0, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_exactly_the_dequantised_weights(kind):
    raw = _stored(kind)
    blocks = weight_blocks(raw, kind)
    want = quants.dequantize(raw, GGMLQuantizationType[kind])
    width = blocks.values.shape[1] // blocks.scale.shape[1]
    scale = np.repeat(blocks.scale.astype(np.float32), width, axis=1)
    got = blocks.values.astype(np.float32) * scale
    if blocks.offset is not None:
        got = got + np.repeat(blocks.offset.astype(np.float32), width, axis=1)
    assert blocks.values.dtype == np.int8
    np.testing.assert_array_equal(got, want)
    if blocks.bits == 4:
        assert blocks.values.min() >= 0
        assert blocks.values.max() <= 15


def test_other_kinds_have_no_blocks():
    assert weight_blocks(np.zeros((1, 84), np.uint8), "Q2_K") is None
