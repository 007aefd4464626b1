"""The calls for Intel GPUs, against strict doubles of the libraries."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leadframe.errors import Unsupported
from leadframe_torch.attention_plan import plan as torch_plan
from leadframe_xpu.ipex_kernels import XPU, IpexKernels
from leadframe_xpu.paged_plan import plan_batch
from leadframe_xpu.plugin import platform_kernels
from leadframe_xpu.vllm_kernels import VllmKernels


@pytest.fixture(params=["ipex", "vllm"])
def kernels(request, doubles):
    if request.param == "ipex":
        return IpexKernels(doubles.IpexXpu(), XPU)
    return VllmKernels(doubles.VllmXpu())


def test_results_match_the_oracle(kernels, make_backend, cases, case):
    result, oracle, live = cases.run_case(make_backend(kernels), case, torch.float16)
    np.testing.assert_allclose(result[live], oracle[live], rtol=2e-3, atol=2e-3)
    assert np.isfinite(result).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_leaks(kernels, make_backend, cases, poison):
    case = cases.CASES["mixed padded"]
    result, oracle, live = cases.run_case(
        make_backend(kernels), case, torch.bfloat16, poison=poison
    )
    np.testing.assert_allclose(result[live], oracle[live], rtol=2e-2, atol=2e-2)
    assert np.isfinite(result).all()


def test_torch_attention_serves_the_same_plan(kernels, make_backend, cases, case):
    (offered,) = platform_kernels("xpu")
    backend = make_backend(kernels)
    backend._ops["attention"] = offered.fn
    result, oracle, live = cases.run_case(backend, case, torch.float16)
    np.testing.assert_allclose(result[live], oracle[live], rtol=5e-3, atol=5e-3)


def test_ipex_on_xpu_never_asks_for_the_decode_call(doubles, make_backend, cases):
    api = doubles.IpexXpu()
    kernels = IpexKernels(api, XPU, decode="single_query")
    cases.run_case(make_backend(kernels), cases.CASES["mixed"], torch.float16)
    assert api.calls == ["write", "varlen"]


def test_a_missing_vllm_kernel_is_refused(doubles, make_backend, cases):
    kernels = VllmKernels(doubles.VllmXpu(missing=["head_dim 72"]))
    with pytest.raises(Unsupported, match=r"head_dim 72.*kernels=torch"):
        cases.run_case(make_backend(kernels), cases.CASES["decodes"], torch.float16)


def test_where_nothing_may_be_read_minus_one_goes_to_the_null_block(cases):
    case = cases.CASES["mixed padded"]
    arrays = cases.step_arrays(case)
    arrays.slots[3] = -1
    plan = plan_batch(
        arrays, torch_plan(arrays, case.params, may_read=False), torch.int64, may_read=False
    )
    assert plan.slots[3] == plan.arrays.slots[3] == 0
    assert plan.slots.min() == 0
    assert (plan.kv_lens >= arrays.query_start.diff()).all()
    assert plan.max_query == arrays.bucket.num_tokens - arrays.bucket.num_decodes


def test_a_plan_without_reading_takes_arrays_that_have_no_values(cases):
    """The meta device stands for any other: reading a value from it raises."""
    case = cases.CASES["mixed padded"]
    arrays = cases.step_arrays(case)
    names = ("query_start", "seq_lens", "block_table", "slots")
    arrays = replace(arrays, **{name: getattr(arrays, name).to("meta") for name in names})
    plan = plan_batch(
        arrays, torch_plan(arrays, case.params, may_read=False), torch.int64, may_read=False
    )
    assert plan.facts is None
    assert plan.is_padding is not None
    assert not plan.owns_every_token
