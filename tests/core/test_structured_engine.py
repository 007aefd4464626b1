"""Constrained requests in a real engine: masks, ends, isolation, schedule independence."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadframe import LLM, SamplingParams
from leadframe.engine import AsyncEngine, constraint_pool
from leadframe.engine.constraint_pool import ConstraintPool
from leadframe.errors import EngineDead, QueueFull, RequestError
from leadframe.request import FinishReason

PROMPT = [1, 2, 3, 4, 5]
EOS = 319
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def params(max_tokens=80, **fields):
    given = {name: fields.pop(name) for name in ("json", "regex", "choice", "grammar")
             if name in fields}  # fmt: skip
    fields.setdefault("temperature", 0.0)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=given, **fields)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_output_is_what_was_asked_for(tiny_llm, temperature) -> None:
    llm = tiny_llm(num_blocks_override=256)
    asks = [
        params(200, json=SCHEMA, temperature=temperature, seed=1),
        params(regex=r"[a-c]{3}-\d{2,4}", temperature=temperature, seed=2),
        params(choice=["yes", "no, never", "né"], temperature=temperature, seed=3),
        params(grammar='start: "<" NAME ("," NAME)* ">"\nNAME: /[xyz]{1,2}/', max_tokens=40,
               temperature=temperature, seed=4),
        SamplingParams(temperature=temperature, max_tokens=12, seed=5),
    ]  # fmt: skip
    free = tiny_llm().generate([PROMPT], [asks[-1]])[0]
    done = llm.generate([PROMPT] * len(asks), asks)
    value = json.loads(done[0].text)
    assert set(value) == {"name", "tags", "size"}
    assert re.fullmatch("[a-z]{1,6}", value["name"])
    assert set(value["tags"]) <= {"x", "yy"}
    assert len(value["tags"]) <= 2
    assert 10 <= value["size"] <= 99
    assert re.fullmatch(r"[a-c]{3}-\d{2,4}", done[1].text)
    assert done[2].text in ("yes", "no, never", "né")
    assert [c.finish_reason for c in done[:3]] == [FinishReason.STOP] * 3
    finished = done[3].finish_reason is FinishReason.STOP
    assert re.fullmatch(r"<[xyz]{1,2}(,[xyz]{1,2})*" + (">" if finished else ",?"), done[3].text)
    assert done[4].token_ids == free.token_ids, "a free request is not bound by its neighbours"
    counts = llm.engine.metrics.structured.counts
    assert counts == {"json": 1, "regex": 1, "choice": 1, "grammar": 1}


def test_the_request_ends_with_the_grammar(tiny_llm) -> None:
    """No token follows what is complete, so none is computed, and a limit there cuts nothing."""
    llm = tiny_llm()
    for limit in (80, 3):
        done = llm.generate([PROMPT], params(limit, choice=["yes"]))[0]
        assert (done.text, len(done.token_ids)) == ("yes", 3)
        assert done.finish_reason is FinishReason.STOP
        assert done.stop_reason is None
    cut = llm.generate([PROMPT], params(2, choice=["yes"]))[0]
    assert (cut.text, cut.finish_reason) == ("ye", FinishReason.LENGTH)


def test_the_end_may_come_only_where_the_grammar_lets_it(tiny_llm) -> None:
    """However much a request wants to end, and however much it does not."""
    llm = tiny_llm()
    eager = llm.generate([PROMPT], params(regex="(ab)+", logit_bias={EOS: 100}))[0]
    assert (eager.text, eager.finish_reason) == ("ab", FinishReason.STOP)
    assert eager.token_ids[-1] == EOS
    held = llm.generate([PROMPT], params(regex="(ab)+", logit_bias={EOS: 100}, min_tokens=3))[0]
    assert held.text == "abab"
    endless = llm.generate([PROMPT], params(7, regex="(ab)+", ignore_eos=True))[0]
    assert (endless.text, endless.finish_reason) == ("abababa", FinishReason.LENGTH)
    stopped = llm.generate([PROMPT], params(regex="(ab)+", ignore_eos=True, stop=["ba"]))[0]
    assert (stopped.text, stopped.stop_reason) == ("a", "ba")


def test_bans_yield_to_the_grammar(tiny_llm) -> None:
    llm = tiny_llm()
    letters = [llm.tokenizer.encode(letter)[0] for letter in "yes"]
    banned = params(choice=["yes"], bad_words_ids=[[letter] for letter in letters], min_tokens=9)
    done = llm.generate([PROMPT], banned)[0]
    assert (done.text, done.finish_reason) == ("yes", FinishReason.STOP)
    either = params(regex="[yn]", bad_words_ids=[letters[:1]])
    assert llm.generate([PROMPT], either)[0].text == "n"


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_logprobs_are_of_the_raw_logits(tiny_llm, device) -> None:
    """Also where ops write into their input."""
    llm = tiny_llm(device=device, block_size=16, num_blocks_override=16)
    free = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, logprobs=3))[0]
    bound = llm.generate([PROMPT], params(choice=["q"], logprobs=3))[0]
    assert bound.token_ids != free.token_ids
    for (token, value), (free_token, free_value) in zip(
        bound.logprobs[0].top, free.logprobs[0].top, strict=True
    ):
        assert (token, value) == (free_token, pytest.approx(free_value, abs=1e-4))
    assert bound.logprobs[0].rank > 1
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_bad_constraint_is_refused_and_loses_nothing(tiny_llm) -> None:
    llm = tiny_llm()
    good = params(json=SCHEMA)
    before = llm.generate([PROMPT], good)[0]
    for bad in (params(regex="["), params(json={"$ref": "#"}), params(grammar="start: x")):
        with pytest.raises(RequestError) as caught:
            llm.engine.add_request("bad", PROMPT, bad)
        assert caught.value.param == "structured_outputs"
        assert not llm.engine.has_work
        assert llm.generate([PROMPT], good)[0].token_ids == before.token_ids
    assert llm.engine.metrics.structured.counts["regex"] == 0


def test_offline_too_grammars_are_rehearsed_in_a_process_that_ends_with_the_engine(
    tiny_llm,
) -> None:
    llm = tiny_llm()
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    grammars = llm.engine.grammars
    assert grammars._rehearsal._worker is None, "nobody needed it yet"
    llm.generate([PROMPT], params(choice=["yes"]))
    process = grammars._rehearsal._worker.process
    assert process.poll() is None
    llm.close()
    assert process.poll() is not None


class Failing:
    """A constraint that cannot judge the third token."""

    def __init__(self) -> None:
        self.error, self.is_complete, self._inner = None, False, 0

    def advance(self, output_token_ids):
        self._inner = len(output_token_ids)

    def mask(self):
        if self._inner == 2:
            self.error = "the grammar cannot go on: too many states"
        return np.zeros(10, np.int32)


def test_a_failure_on_the_way_ends_that_request_alone(tiny_llm) -> None:
    llm = tiny_llm()
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    alone = llm.generate([PROMPT], free)[0].token_ids
    engine = llm.engine
    engine.add_request("bad", PROMPT, params(8, regex="a*"), constraint=Failing())
    engine.add_request("good", PROMPT, free)
    last, tokens = {}, []
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
            tokens += output.token_ids if output.request_id == "good" else ()
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert "too many states" in last["bad"].error
    assert last["bad"].num_output_tokens == 2
    assert tokens == alone
    assert engine.parts.scheduler.kv.usage == 0


_ASKS = [
    params(json=SCHEMA, seed=1, temperature=1.0),
    params(regex="[a-f]{4,9}(xy)*", max_tokens=14, seed=2, temperature=1.2, top_p=0.9),
    params(regex="[a-z ]{20}", seed=3, temperature=0.7, top_k=5),
    params(choice=["alpha beta", "gamma"], presence_penalty=1.0, logprobs=1),
    SamplingParams(temperature=1.0, seed=9, max_tokens=10, ignore_eos=True),
]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """What each request says when it is alone, in one chunk, with all the memory there is."""
    with LLM(
        str(tiny_model),
        device="reference",
        block_size=4,
        num_blocks_override=64,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [PROMPT + [i] * (3 * i) for i in range(len(_ASKS))]
        return prompts, [
            llm.generate([p], a)[0].token_ids for p, a in zip(prompts, _ASKS, strict=True)
        ]


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    order=st.permutations(range(len(_ASKS))),
    config=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([5, 8, 64]),
            "max_num_seqs": st.sampled_from([1, 2, 5]),
            "enable_prefix_caching": st.booleans(),
            "num_blocks_override": st.sampled_from([26, 40]),
            "max_model_len": st.just(100),
        }
    ),
)
def test_scheduling_changes_no_constrained_token(tiny_llm, alone, order, config) -> None:
    prompts, expected = alone
    llm = tiny_llm(**config)
    done = llm.generate([prompts[i] for i in order], [_ASKS[i] for i in order])
    assert [c.token_ids for c in done] == [expected[i] for i in order]
    llm.close()


def test_preemption_neither_loses_nor_repeats_grammar_state(tiny_llm) -> None:
    ask = params(24, regex="[a-p]{20}q", seed=3, temperature=1.0)
    roomy = tiny_llm().generate([PROMPT] * 4, ask)
    tight = tiny_llm(num_blocks_override=12, max_model_len=32, max_num_seqs=4)
    done = tight.generate([PROMPT] * 4, ask)
    assert tight.engine.metrics.preemptions.value > 0
    assert [c.token_ids for c in done] == [c.token_ids for c in roomy]
    assert all(re.fullmatch("[a-p]{20}q", c.text) for c in done)


# --- behind asyncio -------------------------------------------------------------------------


def test_compiling_happens_in_neither_of_the_two_loops(tiny_llm) -> None:
    """While a grammar compiles, other requests move and the event loop turns."""
    engine = AsyncEngine(tiny_llm().engine)
    compiler, release = engine.engine.grammars, threading.Event()
    usual, seen = compiler.compile, []

    def slow(wanted, *, ignore_eos=False):
        seen.append(threading.current_thread().name)
        assert release.wait(20)
        return usual(wanted, ignore_eos=ignore_eos)

    compiler.compile = slow

    async def run():
        async def collect(request_id, own):
            return [output async for output in engine.generate(request_id, PROMPT, own)]

        bound = asyncio.create_task(collect("bound", params(choice=["yes"])))
        while not seen:
            await asyncio.sleep(0.005)
        free = await collect("free", SamplingParams(max_tokens=3, ignore_eos=True))
        assert free[-1].finished
        assert not bound.done()
        release.set()
        outputs = await bound
        assert "".join(output.text for output in outputs) == "yes"
        again = await collect("again", params(choice=["yes"]))
        assert "".join(output.text for output in again) == "yes"
        await engine.shutdown()

    asyncio.run(run())
    assert [name.startswith("leadframe-grammar") for name in seen] == [True], "cached the 2nd time"


def test_shutting_down_does_not_wait_for_what_is_compiled(tiny_llm) -> None:
    endless = " & ".join(f"/(x{{{n}}})*y/" for n in (97, 101, 103, 107))

    async def run():
        engine = AsyncEngine(tiny_llm().engine)
        ask = params(grammar=f"start: A\nA: {endless}")
        bound = asyncio.create_task(engine.submit("endless", PROMPT, ask))
        while engine.engine.grammars._rehearsal._worker is None:
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await engine.shutdown()
        with pytest.raises(EngineDead, match="shutting down"):
            await bound
        assert time.monotonic() - started < 5

    asyncio.run(run())


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_pool_passes_on_whether_eos_is_ignored(ignore_eos, is_known) -> None:
    class Compiler:
        def known(self, wanted, *, ignore_eos):
            return ("known", ignore_eos) if is_known else None

        def compile(self, wanted, *, ignore_eos):
            return ("compiled", ignore_eos)

        def close(self):
            pass

    async def run():
        pool = ConstraintPool(Compiler())
        found = await pool.constraint(params(regex="a", ignore_eos=ignore_eos))
        assert found == ("known" if is_known else "compiled", ignore_eos)
        pool.close()

    asyncio.run(run())


class Slow:
    """A compiler that is busy until it is told or closed."""

    def __init__(self) -> None:
        self.begun, self.release = [], threading.Event()

    def known(self, wanted, *, ignore_eos):
        return None

    def compile(self, wanted, *, ignore_eos):
        self.begun.append(wanted.text)
        self.release.wait(10)
        return wanted.text

    def close(self):
        self.release.set()


def test_who_waits_behind_others_is_told_to_try_again() -> None:
    """It is not their fault, so it is 503; and what they gave up is not compiled."""
    compiler = Slow()

    async def run():
        pool = ConstraintPool(compiler, seconds=0.1)
        first = asyncio.create_task(pool.constraint(params(regex="first")))
        await asyncio.sleep(0.02)
        with pytest.raises(QueueFull, match=r"waited 0\.1 s; try again later") as caught:
            await pool.constraint(params(regex="behind"))
        assert caught.value.status == 503
        await asyncio.sleep(0.1)
        assert not first.done(), "what is begun has its own limit"
        assert await pool.constraint(SamplingParams()) is None
        compiler.release.set()
        assert await first == "first"
        assert await pool.constraint(params(regex="later")) == "later"
        assert compiler.begun == ["first", "later"]
        pool.close()

    asyncio.run(run())


def test_the_queue_for_compiling_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(constraint_pool, "_MAX_WAITING", 2)
    compiler = Slow()

    async def run():
        pool = ConstraintPool(compiler)
        tasks = [asyncio.create_task(pool.constraint(params(regex="a")))]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(pool.constraint(params(regex=r))) for r in "bc"]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull, match="2 wait already"):
            await pool.constraint(params(regex="d"))
        tasks[1].cancel()
        await asyncio.sleep(0.02)
        compiler.release.set()
        assert await asyncio.gather(*tasks, return_exceptions=True) == ["a", ANY, "c"]
        assert compiler.begun == ["a", "c"], "nobody waited for b any more"
        pool.close()

    asyncio.run(run())


def test_closing_the_pool_ends_what_waits_and_what_is_compiled() -> None:
    async def run():
        pool = ConstraintPool(Slow())
        tasks = [asyncio.create_task(pool.constraint(params(regex=r))) for r in "ab"]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        pool.close()
        begun, waiting = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < 5
        assert begun == "a"
        assert isinstance(waiting, EngineDead)
        with pytest.raises(EngineDead, match="shutting down"):
            await pool.constraint(params(regex="a"))

    asyncio.run(run())
