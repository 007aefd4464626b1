"""The layer kernels in Triton's interpreter, against torch in float64 or its own float32 ops."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.triton_interp

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


def close(got, exact):
    scale = exact.abs().max()
    assert (got.double() - exact.double()).abs().max() < TOLERANCE[got.dtype] * scale


def norm(x, weight, eps, offset=0.0):
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 576), (70, 64), (3, 4, 48), (1, 2048)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(context, dtype, shape, offset):
    from leadframe_triton import layers

    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(layers.rms_norm(context, x, weight, 1e-5, offset), norm(x, weight, 1e-5, offset))


def test_rms_norm_adds_eps_inside_the_root(context):
    from leadframe_triton import layers

    x, weight = torch.full((2, 64), 1e-3), torch.ones(64)
    close(layers.rms_norm(context, x, weight, 1e-2), norm(x, weight, 1e-2))


@DTYPES
def test_add_rms_norm_returns_the_rounded_sum(context, dtype):
    from leadframe_triton import layers

    x, residual = (torch.randn(6, 80).to(dtype) for _ in range(2))
    weight = torch.randn(80).to(dtype)
    out, total = layers.add_rms_norm(context, x, residual, weight, 1e-6, 1.0)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, layers.rms_norm(context, total, weight, 1e-6, 1.0)), "of the rounded"
    close(out, norm(x + residual, weight, 1e-6, 1.0))


def test_norms_read_rows_that_are_apart(context):
    from leadframe_triton import layers

    wide, weight = torch.randn(5, 200), torch.randn(64)
    close(layers.rms_norm(context, wide[:, :64], weight, 1e-6), norm(wide[:, :64], weight, 1e-6))


@DTYPES
@pytest.mark.parametrize(("heads", "dim", "rotated"), [(3, 64, 64), (9, 80, 80), (2, 96, 48)])
def test_rope(context, dtype, heads, dim, rotated):
    from leadframe_torch import layer_ops
    from leadframe_triton import layers

    table = layer_ops.rope_table(torch.tensor([0, 5, 1000]), torch.rand(rotated // 2))
    x = torch.randn(3, heads, dim).to(dtype)
    close(layers.rope(context, x, table), layer_ops.rope(x.double(), table))


def test_rope_reads_part_of_a_wider_tensor(context):
    from leadframe_torch import layer_ops
    from leadframe_triton import layers

    table = layer_ops.rope_table(torch.tensor([3, 4]), torch.rand(16))
    wide = torch.randn(2, 8, 32)
    close(layers.rope(context, wide[:, 2:5], table), layer_ops.rope(wide[:, 2:5], table))


@DTYPES
@pytest.mark.parametrize("width", [48, 1500])
def test_gates(context, dtype, width):
    from leadframe_triton import layers

    gate, up = (torch.randn(3, width).mul(3).to(dtype) for _ in range(2))
    silu = torch.nn.functional.silu(gate.double())
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    close(layers.silu_mul(context, gate, up), silu * up.double())
    close(layers.gelu_mul(context, gate, up), gelu * up.double())


def test_gates_read_halves_of_a_fused_projection(context):
    from leadframe_triton import layers

    gate, up = torch.randn(3, 96).chunk(2, dim=1)
    close(layers.silu_mul(context, gate, up), torch.nn.functional.silu(gate) * up)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 48, 20), (70, 130, 129)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(context, dtype, shape, with_bias):
    from leadframe_triton import linear

    rows, width, num_out = shape
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(num_out, width).to(dtype)
    bias = torch.randn(num_out).to(dtype) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    close(linear.linear(context, x, weight, bias), exact)


def test_linear_rows_have_the_same_bits_alone(context):
    from leadframe_triton import linear

    x, weight = torch.randn(70, 130), torch.randn(40, 130)
    whole = linear.linear(context, x, weight)
    for row in (0, 33, 69):
        assert torch.equal(linear.linear(context, x[row : row + 1], weight)[0], whole[row])
