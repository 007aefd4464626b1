"""Planted misuse raises before any native call."""

import pytest
import torch

from leadframe.errors import ContractViolation
from leadframe_xpu.ipex_kernels import HOST, XPU, IpexKernels
from leadframe_xpu.vllm_kernels import VllmApi, VllmKernels


@pytest.fixture(params=["ipex on the host", "ipex", "vllm"])
def kernels(request, doubles):
    """Kernels whose attention must not be reached; writing is allowed where it is correct."""
    api = doubles.Untouchable()
    api.reshape_and_cache = api.reshape_and_cache_flash = lambda *args: None
    if request.param == "vllm":
        return VllmKernels(VllmApi(api.flash_attn_varlen_func, api.reshape_and_cache_flash))
    return IpexKernels(api, HOST if request.param == "ipex on the host" else XPU)


def test_misuse_raises(misuse, misuse_name, kernels, make_backend, cases):
    bench = misuse.Bench(make_backend(kernels), cases.CASES["mixed"], cases, torch.float16)
    change, message = misuse.MISUSE[misuse_name]
    with pytest.raises(ContractViolation, match=message):
        bench.run(**change(bench))


def test_the_same_batch_unchanged_reaches_the_kernel(misuse, kernels, make_backend, cases, doubles):
    bench = misuse.Bench(make_backend(kernels), cases.CASES["mixed"], cases, torch.float16)
    with pytest.raises(doubles.Misuse, match="flash_attn_varlen_func was called"):
        bench.run()


def test_every_problem_is_listed(misuse, kernels, make_backend, cases):
    bench = misuse.Bench(make_backend(kernels), cases.CASES["mixed"], cases, torch.float16)
    slots, lens = bench.copy("slots").long(), bench.copy("seq_lens").long()
    with pytest.raises(ContractViolation) as caught:
        bench.run(slots=slots, seq_lens=lens)
    assert len(caught.value.problems) == 2
