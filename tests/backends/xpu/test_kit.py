"""The conformance kit over the doubles: every attention, memory and honesty case of the core."""

import pytest

from leadframe.conformance.case import in_tier
from leadframe.conformance.execute import execute
from leadframe.conformance.groups import all_cases
from leadframe.conformance.kit import Kit
from leadframe.platform.guard import guard
from leadframe_xpu import plugin
from leadframe_xpu.ipex_kernels import XPU, IpexKernels
from leadframe_xpu.vllm_kernels import VllmKernels

SUBJECTS = ("B.attention", "B.exact", "B.kv", "C.", "D.", "G.", "I.")
CASES = [case for case in in_tier(all_cases(), "core") if case.id.startswith(SUBJECTS)]


@pytest.fixture(scope="module", params=["ipex", "vllm"])
def kit(request, doubles, make_backend):
    def kernels():
        if request.param == "ipex":
            return IpexKernels(doubles.IpexXpu(), XPU)
        return VllmKernels(doubles.VllmXpu())

    offered = tuple(plugin.platform_kernels("xpu"))
    return Kit(open=lambda: guard(make_backend(kernels())), device="xpu", kernels=offered)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(kit, case):
    result = execute(kit, case)
    assert result.outcome in ("passed", "not claimed"), result.reason


def test_the_cases_are_many():
    assert len(CASES) > 80
