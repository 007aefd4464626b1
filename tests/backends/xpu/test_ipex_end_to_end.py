"""The embedded model on IPEX's kernels: the same tokens as on the CPU platform.

Each device has a process of its own: IPEX overrides torch's operators where it is imported.
"""

import json
import subprocess
import sys

import pytest

from leadframe_xpu.installed import read_installed
from leadframe_xpu.ranking import rank

pytestmark = [
    pytest.mark.ipex,
    pytest.mark.skipif(
        rank(read_installed(), "host").used != "ipex",
        reason="IPEX's CPU build is not here: .ci/lanes/ipex.sh makes its environment",
    ),
]

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "List three colours: red, green and blue. List three animals that live in the sea, with one "
    "sentence about each of them, and say which of the three is the largest:",
)


GENERATE = """
import json, sys
from leadframe.llm import LLM
from leadframe.sampling_params import SamplingParams
device, options, prompts = json.loads(sys.argv[1])
llm = LLM(
    device=device, options=options, dtype="float32", max_model_len=128, max_num_seqs=4,
    max_num_batched_tokens=16,  # the long prompt comes in chunks, beside decodes
)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
print(json.dumps([completion.token_ids for completion in llm.generate(prompts, params)]))
llm.close()
"""


def generate(device, **options):
    """Greedy tokens of each prompt."""
    arguments = json.dumps([device, options, PROMPTS])
    result = subprocess.run(
        [sys.executable, "-c", GENERATE, arguments], capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def expected():
    tokens = generate("cpu")
    assert [len(ids) for ids in tokens] == [12, 12, 12]
    return tokens


@pytest.mark.parametrize("decode", ["varlen", "single_query"])
def test_tokens_equal_those_of_the_cpu_platform(expected, decode):
    assert generate("xpu", target="host", ipex_decode=decode) == expected
