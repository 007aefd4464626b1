"""IPEX's real kernels on the host: runs in the environment of the IPEX lane."""

import sys

import numpy as np
import pytest
import torch

from leadframe.errors import ContractViolation
from leadframe_xpu.installed import read_installed
from leadframe_xpu.ipex_kernels import HOST, IpexKernels
from leadframe_xpu.libraries import load_ipex
from leadframe_xpu.ranking import rank

pytestmark = [
    pytest.mark.ipex,
    pytest.mark.skipif(
        rank(read_installed(), "host").used != "ipex",
        reason="IPEX's CPU build is not here: .ci/lanes/ipex.sh makes its environment",
    ),
]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def api():
    return load_ipex()


@pytest.fixture(params=["varlen", "single_query"])
def backend(request, api, make_backend):
    return make_backend(IpexKernels(api, HOST, request.param))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_match_the_oracle(backend, cases, case, dtype):
    result, oracle, live = cases.run_case(backend, case, dtype)
    np.testing.assert_allclose(
        result[live], oracle[live], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert np.isfinite(result).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_nothing_leaks(backend, cases, case, poison):
    result, oracle, live = cases.run_case(backend, case, torch.float32, poison=poison)
    np.testing.assert_allclose(result[live], oracle[live], rtol=2e-6, atol=2e-6)
    assert np.isfinite(result).all()


@pytest.mark.parametrize("size", HOST.facts.block_sizes)
def test_block_sizes(backend, cases, size):
    """The decode call cuts keys at 128; longer rows than that find out."""
    case = cases.Case(((1, 300), (1, 129), (3, 140)), 2, block_size=size)
    result, oracle, _ = cases.run_case(backend, case, torch.float32)
    np.testing.assert_allclose(result, oracle, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dim", [16, 40, 80, 96, 100, 192, 256])
def test_head_dims(backend, cases, dim):
    case = cases.Case(((1, 40), (5, 19)), 1, dim=dim, window=7)
    result, oracle, _ = cases.run_case(backend, case, torch.float32)
    np.testing.assert_allclose(result, oracle, rtol=2e-6, atol=2e-6)


def test_misuse_raises_and_the_process_lives(backend, misuse, misuse_name, cases):
    bench = misuse.Bench(backend, cases.CASES["mixed"], cases, torch.float32)
    change, message = misuse.MISUSE[misuse_name]
    with pytest.raises(ContractViolation, match=message):
        bench.run(**change(bench))
    assert torch.isfinite(bench.run()).all()


def test_read_write_and_copy_agree_with_the_append(backend, cases):
    """One canonical layout, whatever the strides."""
    misused = cases.CASES["mixed"]
    from leadframe.platform import KVLayerSpec, KVSpec

    spec = KVSpec((KVLayerSpec(misused.kv_heads, misused.dim),), misused.block_size)
    kv = backend.kv_alloc(spec, cases.num_blocks(misused))[0]
    arrays = cases.step_arrays(misused)
    tokens = arrays.bucket.num_tokens
    k = cases.random((tokens, misused.kv_heads, misused.dim), 3, torch.float32)
    backend.ops["kv_append"](kv, k, -k, backend.ops["plan"](arrays, misused.params))
    block, offset = divmod(int(arrays.slots[2]), misused.block_size)
    read = backend.kv_read(kv, [block])
    np.testing.assert_array_equal(read[0, 0, offset], k[2].numpy())
    np.testing.assert_array_equal(read[0, 1, offset], -k[2].numpy())
    backend.kv_write(kv, [1], 2 * read)
    backend.ops["kv_copy"](kv, np.array([1], np.int32), np.array([2], np.int32))
    np.testing.assert_array_equal(backend.kv_read(kv, [2]), 2 * read)


def test_loading_leaves_transformers_alone(api):
    import transformers.dynamic_module_utils as utils

    assert sys.modules["transformers"] is not None
    for name in ("get_imports", "get_relative_imports", "get_cached_module_file"):
        assert getattr(utils, name).__module__ == "transformers.dynamic_module_utils"


class TestTrapsAreReal:
    """What the guard prevents; should one of these fail, a later IPEX has mended it."""

    @pytest.fixture
    def run(self, api):
        def run(strided=False, max_query=4, lens=(4, 6)):
            generator = torch.Generator().manual_seed(0)
            keys, values = torch.randn((2, 8, 2, 16, 64), generator=generator).unbind(0)
            if strided:
                keys, values = (
                    side.transpose(1, 2).contiguous().transpose(1, 2) for side in (keys, values)
                )
            q, out = torch.randn((8, 4, 64), generator=generator), torch.full((8, 4, 64), 9.0)
            starts = torch.tensor([0, 4, 8], dtype=torch.int32)
            sums = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
            table = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
            api.flash_attn_varlen_func(
                out, q, keys, values, starts, sums, max_query, 32, 0.125, True, table, None
            )
            return out

        return run

    def test_varlen_ignores_the_stride_between_tokens(self, run):
        assert (run() - run(strided=True)).abs().max() > 0.1

    def test_tokens_past_max_query_are_not_computed(self, run):
        assert (run(max_query=2) == 9.0).any()

    def test_a_row_without_keys_is_nan(self, run):
        assert run(lens=(0, 6))[:4].isnan().all()
