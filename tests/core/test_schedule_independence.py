"""How a request is scheduled never changes what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadframe import LLM, SamplingParams

_SHARED = [11, 12, 13, 14, 15, 16, 17, 18]


@dataclass(frozen=True)
class _Ask:
    prompt: tuple[int, ...]
    params: SamplingParams


def _ask(seed: int, length: int, tail: int, shares_prefix: bool, sampled: bool) -> _Ask:
    own = [(seed * 31 + i * 7) % 250 for i in range(length)]
    prompt = (_SHARED if shares_prefix else []) + own
    if sampled:
        params = SamplingParams(
            temperature=0.9, top_p=0.9, top_k=50, seed=seed, max_tokens=tail, ignore_eos=True
        )
    else:
        params = SamplingParams(temperature=0.0, max_tokens=tail, ignore_eos=True, logprobs=1)
    return _Ask(tuple(prompt), params)


_asks = st.lists(
    st.builds(
        _ask,
        st.integers(0, 999),
        st.integers(1, 14),
        st.integers(1, 8),
        st.booleans(),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)
_settings = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([5, 8, 16, 64]),
        "max_num_seqs": st.sampled_from([1, 2, 5]),
        "enable_prefix_caching": st.booleans(),
        "num_blocks_override": st.sampled_from([9, 12, 64]),
        "block_size": st.just(4),
        "max_model_len": st.just(32),
    }
)


@pytest.fixture(scope="module")
def alone(tiny_model) -> Callable[[_Ask], tuple[list[int], list[float] | None]]:
    """Answers one request alone, unbatched, uncached, in one chunk."""
    llm = LLM(
        str(tiny_model),
        device="reference",
        block_size=4,
        num_blocks_override=64,
        enable_prefix_caching=False,
    )
    known: dict = {}

    def answer(ask: _Ask) -> tuple[list[int], list[float] | None]:
        key = (ask.prompt, repr(ask.params))
        if key not in known:
            known[key] = _answer(llm.generate([list(ask.prompt)], ask.params)[0])
        return known[key]

    yield answer
    llm.close()


def _answer(completion) -> tuple[list[int], list[float] | None]:
    logprobs = completion.logprobs and [entry.logprob for entry in completion.logprobs]
    return completion.token_ids, logprobs


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(asks=_asks, config=_settings)
def test_chunks_batches_preemption_and_cache_change_nothing(tiny_llm, alone, asks, config) -> None:
    llm = tiny_llm(**config)
    expected = [alone(ask) for ask in asks]
    for _ in range(2):  # the second time around the prefix cache is warm
        got = llm.generate([list(a.prompt) for a in asks], [a.params for a in asks])
        for completion, (tokens, logprobs) in zip(got, expected, strict=True):
            assert completion.token_ids == tokens
            if logprobs is not None:
                assert _answer(completion)[1] == pytest.approx(logprobs, abs=1e-4)
    assert llm.engine.metrics.running.value == 0
    assert llm.engine.parts.scheduler.kv.usage == 0
    llm.close()


def test_a_small_pool_really_preempts(tiny_llm, alone) -> None:
    """The property above means something only if its schedules differ."""
    llm = tiny_llm(num_blocks_override=9, max_model_len=32, max_num_seqs=4)
    asks = [_ask(seed, 6, 12, False, True) for seed in range(4)]
    got = llm.generate([list(a.prompt) for a in asks], [a.params for a in asks])
    assert llm.engine.metrics.preemptions.value > 0
    assert [c.token_ids for c in got] == [alone(a)[0] for a in asks]


def test_requests_that_arrive_together_share_their_prefix(tiny_llm) -> None:
    llm = tiny_llm(max_num_batched_tokens=512)
    prompts = [_SHARED * 3 + [i] for i in range(6)]
    got = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
    assert [c.num_cached_tokens for c in got] == [0, 24, 24, 24, 24, 24]
