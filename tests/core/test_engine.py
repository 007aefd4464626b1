"""The step loop: isolation of requests, stop strings, log-probabilities, failures of the device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pluggy
import pytest

from leadframe import SamplingParams
from leadframe.engine import Engine
from leadframe.errors import DeviceLost, DeviceOOM, PromptTooLong, RequestError
from leadframe.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [9] * 10, [30, 31]]


def _drain(engine: Engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def _is_idle(engine: Engine) -> bool:
    engine.check()
    kv = engine.parts.scheduler.kv
    return (
        kv.num_free_blocks == kv.num_blocks
        and kv.usage == 0
        and engine.num_running == engine.num_waiting == 0
        and engine.metrics.running.value == engine.metrics.waiting.value == 0
        and len(engine._processor) == 0
        and not engine._requests
        and not engine._deciding
    )


@pytest.mark.parametrize(
    ("prompt", "params", "param", "word"),
    [
        ([], GREEDY, "prompt", "empty"),
        ([320], GREEDY, "prompt", "320"),
        ([-1], GREEDY, "prompt", "-1"),
        ([2**63], GREEDY, "prompt", str(2**63)),
        ([1.5], GREEDY, "prompt", "1.5"),
        ([1], SamplingParams(stop_token_ids=[320]), "stop_token_ids", "320"),
        ([1], SamplingParams(logit_bias={320: 1.0}), "logit_bias", "320"),
        ([1], SamplingParams(allowed_token_ids=[1000]), "allowed_token_ids", "1000"),
    ],
)
def test_a_bad_request_is_refused_and_loses_nothing(tiny_llm, prompt, params, param, word) -> None:
    llm = tiny_llm()
    before = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    with pytest.raises(RequestError, match=word) as caught:
        llm.engine.add_request("bad", prompt, params)
    assert caught.value.param == param
    assert _is_idle(llm.engine)
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == before


@pytest.mark.parametrize(
    ("length", "max_tokens", "allowed"),
    [(16, 1, False), (17, None, False), (10, 10, False), (10, 6, True), (10, None, True)],
)
def test_the_context_is_never_exceeded_and_never_truncated(
    tiny_llm, length, max_tokens, allowed
) -> None:
    llm = tiny_llm(max_model_len=16)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    if allowed:
        done = llm.generate([[1] * length], params)[0]
        assert (len(done.token_ids), done.finish_reason) == (6, FinishReason.LENGTH)
        return
    with pytest.raises(PromptTooLong, match=r"16") as caught:
        llm.generate([[1] * length], params)
    assert str(length) in str(caught.value)


def test_a_request_that_no_pool_could_hold_does_not_block_the_queue(tiny_llm) -> None:
    llm = tiny_llm(num_blocks_override=9)
    assert llm.engine.max_model_len == 32  # fitted to 8 usable blocks of 4
    with pytest.raises(PromptTooLong):
        llm.engine.add_request("big", [1] * 40, GREEDY)
    assert len(llm.generate([[1] * 4], GREEDY)[0].token_ids) == 8


def test_nan_in_one_requests_cache_fails_that_request_alone(tiny_llm) -> None:
    llm = tiny_llm(enable_prefix_caching=True)
    expected = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    llm.engine.reset_prefix_cache()
    engine = llm.engine
    requests = [engine.add_request(f"r{i}", p, GREEDY) for i, p in enumerate(PROMPTS)]
    outputs = {o.request_id: [o] for o in engine.step()}
    poisoned = engine.parts.scheduler.kv.block_ids(requests[1]).tolist()
    runner = engine.parts.runner
    layer = runner._spec.layers[0]
    shape = (len(poisoned), 2, 4, layer.num_kv_heads, layer.head_dim)
    bad = np.full(shape, np.nan, np.float32)
    runner._kv[0] = runner.backend.kv_write(runner._kv[0], poisoned, bad)
    for request_id, more in _drain(engine).items():
        outputs[request_id] += more
    assert outputs["r1"][-1].finish_reason is FinishReason.ERROR
    assert "not finite" in outputs["r1"][-1].error
    for i in (0, 2):
        assert [t for o in outputs[f"r{i}"] for t in o.token_ids] == expected[i]
    assert np.isfinite(runner.backend.kv_read(runner._kv[0], poisoned)).all()
    assert engine.metrics.finished.counts["error"] == 1
    assert _is_idle(engine)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected


def test_out_of_memory_in_a_step_preempts_and_retries(tiny_llm) -> None:
    llm = tiny_llm()
    expected = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    runner, calls = llm.engine.parts.runner, []
    execute = runner.execute

    def fails_once(schedule, on_launch):
        calls.append(len(schedule.rows))
        if len(calls) == 4:
            raise DeviceOOM(10, 1, "step")
        return execute(schedule, on_launch)

    runner.execute = fails_once
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    assert calls[4] == calls[3] - 1
    assert _is_idle(llm.engine)


def test_a_request_that_is_alone_and_out_of_memory_fails_alone(tiny_llm) -> None:
    llm = tiny_llm()
    runner = llm.engine.parts.runner
    execute = runner.execute

    def fails(schedule, on_launch):
        raise DeviceOOM(10, 1, "step")

    runner.execute = fails
    done = llm.generate(PROMPTS[0], GREEDY)[0]
    assert done.finish_reason is FinishReason.ERROR
    assert "out of device memory" in done.error
    runner.execute = execute
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 8
    assert _is_idle(llm.engine)


STOPS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=["~never~"])


def test_outputs_come_after_the_next_launch_and_before_its_wait(tiny_llm, monkeypatch) -> None:
    engine = tiny_llm().engine
    engine.overlaps = True
    expected = _drain_one(engine, "before", GREEDY)
    engine.add_request("a", PROMPTS[0], GREEDY)
    backend, events = engine.parts.backend, []
    download = engine.parts.runner.backend.download

    def waited(array):
        events.append("wait")
        return download(array)

    double = SimpleNamespace(download=waited, compile=backend.compile)
    monkeypatch.setattr(engine.parts.runner, "backend", double)
    while engine.has_work:
        engine.advance(lambda outputs: events.extend(t for o in outputs for t in o.token_ids))
        events.append("end")
    rest = engine.settle()
    steps = " ".join(map(str, events)).split("end")[:-1]
    firsts = [step.split()[0] for step in steps]
    assert firsts == ["wait", *map(str, expected[:-1])]
    assert [o.token_ids for o in rest] == [(expected[-1],)]
    assert _is_idle(engine)


def test_outputs_that_are_due_do_not_wait_for_a_step_that_is_compiled_late(tiny_llm) -> None:
    engine = tiny_llm().engine
    engine.overlaps = True
    expected = _drain_one(engine, "before", GREEDY)
    runner, events = engine.parts.runner, []
    compiled = runner._compile

    def noted(bucket, *, capture):
        events.append("compile")
        return compiled(bucket, capture=capture)

    runner._compile = noted
    engine.add_request("a", PROMPTS[0], GREEDY)
    while engine.has_work:
        runner._late.clear()
        engine.advance(lambda outputs: events.extend(t for o in outputs for t in o.token_ids))
    steps = [["compile"], *([token, "compile"] for token in expected[:-1])]
    assert events == [event for step in steps for event in step]


def test_a_device_that_is_not_asynchronous_delivers_each_step_at_once(tiny_llm) -> None:
    """Its next step would be over before anybody saw the tokens of this one."""
    engine = tiny_llm().engine
    assert not engine.parts.backend.caps.asynchronous
    engine.add_request("a", PROMPTS[0], GREEDY)
    counts, delivered = [], []
    while engine.has_work:
        engine.advance(delivered.extend)
        counts.append(sum(len(o.token_ids) for o in delivered))
    assert counts == list(range(1, GREEDY.max_tokens + 1))
    assert engine.settle() == []


def _drain_one(engine: Engine, name: str, params: SamplingParams) -> list[int]:
    engine.add_request(name, PROMPTS[0], params)
    return [token for output in _drain(engine)[name] for token in output.token_ids]


def test_a_stop_string_ends_its_request_in_the_step_all_the_same(tiny_llm) -> None:
    llm = tiny_llm()
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    engine, kv = llm.engine, llm.engine.parts.scheduler.kv
    engine.overlaps = True
    pieces = [o.text for o in llm.stream(PROMPTS[0], GREEDY)]
    stop = next(text for text in pieces[2:] if text.strip())
    steps = next(i for i in range(1, 9) if stop in "".join(pieces[:i]))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=[stop])
    engine.add_request("s", PROMPTS[0], params)
    delivered: list = []
    for _ in range(steps):
        assert engine.has_work
        engine.advance(delivered.extend)
    assert not engine.has_work
    assert kv.num_free_blocks == kv.num_blocks
    delivered += engine.settle()
    assert [t for o in delivered for t in o.token_ids] == whole.token_ids[:steps]
    assert delivered[-1].stop_reason == stop
    assert _is_idle(engine)


@pytest.mark.parametrize("params", [GREEDY, STOPS])
def test_an_abort_loses_no_output_that_was_due(tiny_llm, params) -> None:
    engine = tiny_llm().engine
    engine.overlaps = True
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.add_request(name, prompt, params)
    delivered: list = []
    for _ in range(3):
        engine.advance(delivered.extend)
    aborted = engine.abort("a")
    assert aborted is not None
    assert aborted.finish_reason is FinishReason.ABORT
    engine.advance(delivered.extend)
    delivered += engine.settle()
    counts = {
        name: sum(len(o.token_ids) for o in delivered if o.request_id == name) for name in "ab"
    }
    assert counts == {"a": aborted.num_output_tokens, "b": aborted.num_output_tokens + 1}


def test_what_was_sampled_before_a_launch_failed_is_delivered(tiny_llm) -> None:
    engine = tiny_llm().engine
    engine.overlaps = True
    engine.add_request("a", PROMPTS[0], GREEDY)
    delivered: list = []
    for _ in range(3):
        engine.advance(delivered.extend)
    execute = engine.parts.runner.execute

    def fails(schedule, on_launch):
        raise DeviceOOM(10, 1, "step")

    engine.parts.runner.execute = fails
    engine.advance(delivered.extend)
    engine.parts.runner.execute = execute
    delivered += engine.settle()
    tokens = sum(len(o.token_ids) for o in delivered)
    assert tokens == delivered[-1].num_output_tokens > 0
    assert delivered[-1].finish_reason is FinishReason.ERROR
    assert _is_idle(engine)


def test_a_lost_device_ends_the_step_with_its_own_error(tiny_llm) -> None:
    llm = tiny_llm()

    def lost(schedule, on_launch):
        raise DeviceLost("the device is gone")

    llm.engine.parts.runner.execute = lost
    with pytest.raises(DeviceLost):
        llm.generate([1, 2], GREEDY)


def test_a_fault_in_one_requests_text_ends_that_request_alone(tiny_llm) -> None:
    llm = tiny_llm()
    expected = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    engine = llm.engine
    take = engine._processor.token

    def broken(request, token):
        if request.request_id == "b":
            raise ValueError("no such piece")
        return take(request, token)

    engine._processor.token = broken
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.add_request("b", PROMPTS[1], GREEDY)
    outputs = _drain(engine)
    assert outputs["b"][-1].finish_reason is FinishReason.ERROR
    assert "no such piece" in outputs["b"][-1].error
    assert [t for o in outputs["a"] for t in o.token_ids] == expected
    assert _is_idle(engine)


def test_streamed_text_is_the_whole_text_and_a_stop_string_never_leaks(tiny_llm) -> None:
    llm = tiny_llm()
    whole = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))[
        0
    ]
    assert len(whole.text) > 12
    for start in range(1, 10):
        stop = whole.text[start : start + 3]
        for include in (False, True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=16,
                ignore_eos=True,
                stop=[stop],
                include_stop_str_in_output=include,
            )
            chunks = list(llm.stream("hello", params))
            cut = whole.text.index(stop)
            text = "".join(chunk.text for chunk in chunks)
            assert text == whole.text[: cut + (3 if include else 0)]
            assert chunks[-1].finish_reason is FinishReason.STOP
            assert chunks[-1].stop_reason == stop
            once = llm.generate("hello", params)[0]
            assert (once.text, once.token_ids) == (text, [t for c in chunks for t in c.token_ids])
    assert _is_idle(llm.engine)


def test_min_tokens_holds_back_every_kind_of_stop(tiny_llm) -> None:
    llm = tiny_llm()
    free = llm.generate(PROMPTS[0], GREEDY)[0]
    second = free.token_ids[1]
    stopped = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[second])
    assert llm.generate(PROMPTS[0], stopped)[0].token_ids == free.token_ids[:2]
    held = SamplingParams(
        temperature=0.0, max_tokens=8, stop_token_ids=[second], min_tokens=4, ignore_eos=True
    )
    done = llm.generate(PROMPTS[0], held)[0]
    assert second not in done.token_ids[:4]
    assert len(done.token_ids) >= 4
    text_stop = SamplingParams(
        temperature=0.0, max_tokens=8, stop=[free.text[0]], min_tokens=4, ignore_eos=True
    )
    done = llm.generate(PROMPTS[0], text_stop)[0]
    assert len(done.token_ids) >= 4
    assert done.text.startswith(free.text[0])
    boundary = len(llm.tokenizer.decode(free.token_ids[:3])) - 1
    across = free.text[boundary : boundary + 2]  # ends in the fourth token
    straddles = SamplingParams(
        temperature=0.0, max_tokens=8, stop=[across], min_tokens=4, ignore_eos=True
    )
    done = llm.generate(PROMPTS[0], straddles)[0]
    assert (done.text, len(done.token_ids)) == (free.text[:boundary], 4)


def test_end_of_sequence_is_in_the_ids_and_not_in_the_text(tiny_llm) -> None:
    llm = tiny_llm()
    eos = llm.engine.model_info.eos_token_ids[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=8, logit_bias={eos: 100.0}, skip_special_tokens=False
    )
    done = llm.generate(PROMPTS[0], params)[0]
    assert (done.token_ids, done.text) == ([eos], "")
    assert done.finish_reason is FinishReason.STOP


def test_a_stop_string_that_is_a_special_token_stops(tiny_llm) -> None:
    llm = tiny_llm()
    eos = llm.engine.model_info.eos_token_ids[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, stop=["</s>"], logit_bias={eos: 100.0}
    )
    done = llm.generate(PROMPTS[0], params)[0]
    assert (done.token_ids, done.text, done.stop_reason) == ([eos], "", "</s>")


@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_logprobs_agree_with_the_ones_of_generation(tiny_llm, budget) -> None:
    llm = tiny_llm(max_num_batched_tokens=budget, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    made = llm.generate(PROMPTS[1], params)[0]
    echo = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    scored = llm.generate([PROMPTS[1] + made.token_ids], echo)[0]
    assert scored.finish_reason is FinishReason.LENGTH
    assert scored.token_ids == []
    assert scored.prompt_logprobs[0].logprob is None
    assert len(scored.prompt_logprobs) == len(PROMPTS[1]) + 6
    for mine, again in zip(made.logprobs, scored.prompt_logprobs[len(PROMPTS[1]) :], strict=True):
        assert mine.token_id == again.token_id
        assert mine.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert mine.rank == again.rank == 1
        assert [t for t, _ in mine.top] == [t for t, _ in again.top]


def test_logprobs_do_not_depend_on_how_the_token_is_chosen(tiny_llm) -> None:
    llm = tiny_llm()
    greedy = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=10))[0]
    values = dict(greedy.logprobs[0].top)
    for temperature, top_p, count in [(0.5, 1.0, 1), (2.0, 0.1, 10), (1.0, 0.9, 0)]:
        params = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=1, seed=1, logprobs=count
        )
        entry = llm.generate(PROMPTS[0], params)[0].logprobs[0]
        assert len(entry.top) == count
        for token, logprob in entry.top:
            assert logprob == pytest.approx(values[token], abs=1e-5)


def test_no_hook_is_called_on_the_step_path(tiny_llm, monkeypatch) -> None:
    llm = tiny_llm()
    calls = []
    original = pluggy.HookCaller.__call__

    def counted(self, **kwargs):
        calls.append(self.name)
        return original(self, **kwargs)

    monkeypatch.setattr(pluggy.HookCaller, "__call__", counted)
    llm.generate(PROMPTS, GREEDY)
    assert calls == []
    tiny_llm()
    assert "platform_create" in calls


def test_an_abort_is_idempotent_at_any_moment(tiny_llm) -> None:
    for steps in range(8):
        llm = tiny_llm(max_num_batched_tokens=4, max_num_seqs=2, num_blocks_override=8)
        engine = llm.engine
        for i in range(3):
            engine.add_request(f"r{i}", [i + 1] * 9, GREEDY)
        for _ in range(steps):
            engine.step()
        for i in (2, 0, 1):
            output = engine.abort(f"r{i}")
            assert output is None or output.finish_reason is FinishReason.ABORT
            assert engine.abort(f"r{i}") is None
        assert engine.abort("nobody") is None
        assert not engine.has_work
        assert _is_idle(engine)
        ended = engine.metrics.finished.counts
        assert sum(ended.values()) == 3
        llm.close()
