"""The Triton kernels behind this backend's plan, in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.triton_interp


@pytest.mark.parametrize("window", [None, 5])
def test_results_match_the_oracle(make_backend, cases, window):
    from leadframe_triton.arch import INTERPRETER
    from leadframe_triton.launch import LaunchContext
    from leadframe_xpu.triton_kernels import TritonKernels

    kernels = TritonKernels(LaunchContext(INTERPRETER))
    padding = cases.Padding(decodes=1, rows=1, tokens=1)
    case = cases.Case(((1, 17), (3, 5)), 1, padding, heads=4, dim=32, window=window)
    result, oracle, live = cases.run_case(
        make_backend(kernels), case, torch.float32, poison=float("nan")
    )
    np.testing.assert_allclose(result[live], oracle[live], rtol=2e-6, atol=2e-6)
    assert np.isfinite(result).all()
