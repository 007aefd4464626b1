"""Packed products: every format, every number of rows, exactly the weights of the source."""

import numpy as np
import pytest
import torch

from leadframe.platform.backend import WeightBlocks
from leadframe_cpu.packed import Format, PackedWeight
from leadframe_cpu.weight_store import block_format

ROWS = (1, 2, 3, 4, 5, 8, 12, 13, 25, 100)
SIZES = ((64, 64), (100, 96), (33, 576), (1, 32), (70, 1536))


class LazyWeight:
    """A weight source, of blocks if it has any."""

    def __init__(self, values, dtype="float32", blocks=None):
        self.values, self.shape, self.dtype, self.blocks = values, values.shape, dtype, blocks

    def read(self, index=None):
        return self.values if index is None else self.values[index]

    def read_blocks(self, index=None):
        return self.blocks


def _blocks(rng, rows, columns, bits, scale_type, size, has_offset):
    low, high = (0, 16) if bits == 4 else (-128, 128)
    values = rng.integers(low, high, (rows, columns)).astype(np.int8)
    # as in GGUF: few enough digits that value * scale is exact
    scale = rng.uniform(0.01, 0.1, (rows, columns // size)).astype(np.float16).astype(scale_type)
    offset = rng.normal(0, 0.5, scale.shape).astype(scale_type) if has_offset else None
    wide = np.repeat(scale.astype(np.float32), size, axis=1)
    weights = values.astype(np.float32) * wide
    if offset is not None:
        weights = weights + np.repeat(offset.astype(np.float32), size, axis=1)
    return WeightBlocks(values, scale, offset, bits), weights


CASES = {
    Format.F32: None,
    Format.BF16: None,
    Format.F16: None,
    Format.INT8_F16: (8, np.float16, 32, False),
    Format.INT8_F32: (8, np.float32, 32, True),
    Format.INT8_F32_B16: (8, np.float32, 16, True),
    Format.INT4_F16: (4, np.float16, 32, True),
    Format.INT4_F32: (4, np.float32, 32, True),
}


@pytest.fixture
def make(native, rng):
    def weight(layout, rows, columns):
        """A packed weight of a format, and its exact values."""
        case = CASES[layout]
        if case is None:
            types = {Format.BF16: torch.bfloat16, Format.F16: torch.float16}
            values = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
            values = values.to(types.get(layout, torch.float32)).float().numpy()
            source = LazyWeight(values.astype(np.float16) if layout == Format.F16 else values)
        else:
            blocks, values = _blocks(rng, rows, columns, *case)
            source = LazyWeight(values, blocks=blocks)
        packed = native.upload(source, "float32", role="linear")
        assert packed.layout == layout
        return packed, values

    return weight


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", CASES, ids=lambda layout: layout.name)
def test_packing_loses_nothing(native, make, layout, size):
    packed, values = make(layout, *size)
    np.testing.assert_array_equal(native.download(packed), values)
    ids = np.array([size[0] - 1, 0, -3, size[0] + 5], np.int32)
    rows = native.download(native.ops["embed"](packed, torch.from_numpy(ids)))
    np.testing.assert_array_equal(rows, values[np.clip(ids, 0, size[0] - 1)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", CASES, ids=lambda layout: layout.name)
def test_products_are_right_and_do_not_depend_on_the_batch(native, make, rng, layout, size):
    packed, values = make(layout, *size)
    x = torch.from_numpy(rng.standard_normal((max(ROWS), size[1])).astype(np.float32))
    bias = torch.from_numpy(rng.standard_normal(size[0]).astype(np.float32))
    exact = x.double() @ torch.from_numpy(values).double().T
    magnitude = x.double().abs() @ torch.from_numpy(values).double().abs().T
    alone = native.ops["linear"](x[:1], packed)[0]
    for rows in ROWS:
        out = native.ops["linear"](x[:rows], packed)
        assert ((out - exact[:rows]).abs() <= 2e-6 * magnitude[:rows] + 1e-9).all()
        assert torch.equal(out[0], alone)
    with_bias = native.ops["linear"](x[:3], packed, bias)
    torch.testing.assert_close(with_bias, native.ops["linear"](x[:3], packed) + bias)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_bfloat16_products(native, rng, rows):
    values = rng.standard_normal((50, 64)).astype(np.float32)
    packed = native.upload(values, "bfloat16", role="linear")
    assert (packed.layout, packed.dtype) == (Format.BF16, torch.bfloat16)
    x = torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32)).bfloat16()
    bias = torch.ones(50, dtype=torch.bfloat16)
    out = native.ops["linear"](x, packed, bias)
    exact = x.double() @ torch.from_numpy(values).bfloat16().double().T + 1
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=5e-3, atol=5e-3)


def test_no_rows_are_no_work(native, make):
    packed, _ = make(Format.F32, 64, 64)
    assert native.ops["linear"](torch.zeros(0, 64), packed).shape == (0, 64)


def test_strided_operands_are_taken(native, make, rng):
    packed, values = make(Format.F32, 64, 64)
    x = torch.from_numpy(rng.standard_normal((6, 128)).astype(np.float32))
    for view in (x[:, ::2], x[::2, :64]):
        torch.testing.assert_close(
            native.ops["linear"](view, packed), view @ torch.from_numpy(values).T
        )


def test_unpacked_weights_are_taken(native, rng):
    weight = native.upload(rng.standard_normal((8, 16)).astype(np.float32))
    x = torch.randn(3, 16)
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(native.ops["linear"](x, weight), x @ weight.T)


def test_float32_that_was_bfloat16_is_stored_in_half_the_bytes(native, rng):
    values = torch.from_numpy(rng.standard_normal((64, 64)).astype(np.float32)).bfloat16()
    packed = native.upload(values.float().numpy(), "float32", role="linear")
    assert (packed.layout, packed.dtype) == (Format.BF16, torch.float32)


def test_a_tied_weight_is_packed_once(native, rng):
    source = LazyWeight(rng.standard_normal((64, 64)).astype(np.float32))
    before = native.memory().used
    table = native.upload(source, "float32", role="embed")
    grown = native.memory().used - before
    head = native.upload(source, "float32", role="linear")
    assert head is table
    assert native.memory().used - before == grown
    other = LazyWeight(source.values)
    assert native.upload(other, "float32", role="linear") is not table


def test_a_weight_that_died_is_packed_again(native, rng):
    source = LazyWeight(rng.standard_normal((64, 64)).astype(np.float32))
    first = native.upload(source, "float32", role="linear")
    before = native.memory().used
    size = first.data.numel()
    del first
    assert native.memory().used == before - size
    assert isinstance(native.upload(source, "float32", role="linear"), PackedWeight)


def test_blocks_of_an_unknown_size_are_dequantised(native, rng):
    blocks, values = _blocks(rng, 32, 64, 8, np.float32, 64, False)
    assert block_format(blocks) is None
    packed = native.upload(LazyWeight(values, blocks=blocks), "float32", role="linear")
    assert packed.layout == Format.F32
    np.testing.assert_array_equal(native.download(packed), values)


def test_half_scales_with_offsets_become_single(native, rng):
    blocks, values = _blocks(rng, 32, 64, 8, np.float16, 32, True)
    packed = native.upload(LazyWeight(values, blocks=blocks), "float32", role="linear")
    assert packed.layout == Format.INT8_F32
    np.testing.assert_array_equal(native.download(packed), values)
