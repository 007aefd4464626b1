"""The engine on a device that records graphs: captured or not, the tokens are the same."""

import pytest

from leadframe import LLM, SamplingParams
from leadframe.engine import Engine
from leadframe.engine.startup import build_parts
from leadframe.llm import engine_config

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [*range(90, 111)], [7, 7, 7, 7]]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3),
    "plain": SamplingParams(seed=1, max_tokens=9, ignore_eos=True, min_p=0.02),
    "filtered": SamplingParams(seed=2, max_tokens=9, ignore_eos=True, top_k=40, top_p=0.9),
    "penalised": SamplingParams(
        seed=3, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5
    ),
    "biased": SamplingParams(
        temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias={3: 4.0, 90: -9.0}, logprobs=0
    ),
    "constrained": SamplingParams(
        seed=4, max_tokens=9, structured_outputs={"regex": "(ab|c[de]){20}"}
    ),
}
MIXES = [[name] * 4 for name in PARAMS] + [
    ["greedy", "filtered", "penalised", "constrained"],
    ["biased", "constrained", "plain", "logprobs"],
]


class CountedGraphs:
    """Records by keeping the function; counts what is recorded and what is replayed."""

    def __init__(self):
        self.records = self.replays = 0

    def record(self, function):
        self.records += 1
        graphs, result = self, function()

        class Graph:
            bytes = 0

            def replay(self):
                graphs.replays += 1
                for name, value in function()[0].items():
                    result[0][name].copy_(value)

            def close(self):
                """Holds nothing."""

        return Graph(), result


@pytest.fixture(scope="module")
def make_llm(tiny_model, make_backend):
    config = engine_config(
        str(tiny_model), block_size=4, num_blocks_override=96, max_num_seqs=6, max_model_len=96
    )

    def make(graphs):
        return LLM.from_engine(Engine(build_parts(config, backend=make_backend(graphs=graphs))))

    return make


def _answers(llm, names):
    completions = llm.generate(PROMPTS, [PARAMS[name] for name in names])
    return [
        (c.token_ids, c.logprobs and [(e.rank, [i for i, _ in e.top]) for e in c.logprobs])
        for c in completions
    ]


@pytest.fixture(scope="module")
def eager(make_llm):
    llm = make_llm(None)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def recorded(make_llm):
    graphs = CountedGraphs()
    llm = make_llm(graphs)
    yield llm, graphs
    llm.close()


@pytest.mark.parametrize("names", MIXES, ids="-".join)
def test_every_way_of_sampling_replays_and_none_is_captured_late(eager, recorded, names):
    llm, graphs = recorded
    policy = llm.engine.parts.runner._policy
    replays = graphs.replays
    assert _answers(llm, names) == _answers(eager, names)
    # a prompt takes a step of its own, then each decode step is one replay
    assert graphs.replays - replays >= 8
    assert graphs.records == len(policy.all_buckets())
    assert llm.engine.metrics.late_compiles.value == 0
