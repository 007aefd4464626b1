"""The engine behind asyncio: concurrency, readers that leave or lag, death, shutdown."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from leadframe import SamplingParams
from leadframe.engine import AsyncEngine, RequestOutput
from leadframe.engine.async_engine import merge
from leadframe.errors import DeviceLost, EngineDead, RequestError
from leadframe.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def engine(tiny_llm):
    made = AsyncEngine(tiny_llm().engine)
    yield made
    asyncio.run(made.shutdown())


async def _collect(engine: AsyncEngine, request_id: str, prompt, params) -> list[RequestOutput]:
    return [output async for output in engine.generate(request_id, prompt, params)]


async def _until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        await asyncio.sleep(0.005)


def test_concurrent_streams_get_their_own_tokens(engine, tiny_llm) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(8)]
    expected = [c.token_ids for c in tiny_llm().generate(prompts, GREEDY)]

    async def run() -> list[list[int]]:
        jobs = [_collect(engine, f"r{i}", p, GREEDY) for i, p in enumerate(prompts)]
        streams = await asyncio.gather(*jobs)
        assert all([o.finished for o in s] == [False] * (len(s) - 1) + [True] for s in streams)
        return [[t for o in s for t in o.token_ids] for s in streams]

    assert asyncio.run(run()) == expected


def test_a_bad_request_raises_at_once_and_the_others_go_on(engine) -> None:
    async def run() -> None:
        good = asyncio.create_task(_collect(engine, "good", [1, 2], GREEDY))
        with pytest.raises(RequestError, match="empty"):
            await _collect(engine, "bad", [], GREEDY)
        assert (await good)[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(run())


def test_leaving_a_stream_frees_its_blocks_within_two_steps(engine) -> None:
    steps_after: list[int] = []
    advance = engine.engine.advance

    def counted(deliver):
        steps_after.append(engine.engine.num_running)
        advance(deliver)

    async def run() -> None:
        stream = engine.generate("gone", [1, 2, 3], LONG)
        other = asyncio.create_task(_collect(engine, "stays", [4, 5], LONG))
        async for _ in stream:
            break
        await _until(lambda: engine.engine.num_running == 2)
        engine.engine.advance = counted
        await stream.aclose()
        await _until(lambda: engine.engine.num_running == 1)
        assert steps_after.count(2) <= 2 + 1  # one step may have begun before the abort came
        await other

    asyncio.run(run())
    assert engine.metrics.finished.counts["abort"] == 1
    assert engine.engine.parts.scheduler.kv.usage == 0


def test_a_slow_reader_gets_everything_in_fewer_outputs(engine) -> None:
    async def run() -> list[RequestOutput]:
        outputs = []
        stream = engine.generate("slow", [7, 8], GREEDY)
        async for output in stream:
            outputs.append(output)
            await _until(lambda: not engine.engine.has_work)
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) <= 2
    assert sum(len(o.token_ids) for o in outputs) == 12


def test_merged_outputs_lose_nothing() -> None:
    first = RequestOutput("r", (1,), "a", logprobs=(), num_output_tokens=1)
    last = RequestOutput(
        "r", (2,), "b", logprobs=(), finish_reason=FinishReason.STOP, num_output_tokens=2
    )
    both = merge(merge(None, first), last)
    assert (both.token_ids, both.text, both.num_output_tokens) == ((1, 2), "ab", 2)
    assert both.finish_reason is FinishReason.STOP
    assert both.logprobs == ()


def test_abort_ends_a_stream_with_one_final_output(engine) -> None:
    async def run() -> None:
        task = asyncio.create_task(_collect(engine, "r", [1], LONG))
        await _until(lambda: engine.engine.num_running == 1)
        await engine.abort("r")
        await engine.abort("r")
        await engine.abort("never was")
        outputs = await task
        assert [o.finish_reason for o in outputs if o.finished] == [FinishReason.ABORT]

    asyncio.run(run())


def test_a_lost_device_reaches_every_stream_and_every_later_call(tiny_llm) -> None:
    inner = tiny_llm().engine
    died = threading.Event()
    engine = AsyncEngine(inner, on_death=lambda error: died.set())
    execute = inner.parts.runner.execute
    calls = []

    def lost(schedule, on_launch):
        calls.append(1)
        if len(calls) > 3:
            raise DeviceLost("the device is gone")
        return execute(schedule, on_launch)

    inner.parts.runner.execute = lost

    async def run() -> None:
        jobs = [_collect(engine, f"r{i}", [i + 1], LONG) for i in range(3)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(r, EngineDead) for r in results)
        assert "device is gone" in str(results[0])
        with pytest.raises(EngineDead):
            await _collect(engine, "late", [1], GREEDY)

    assert engine.health().alive
    asyncio.run(run())
    assert died.wait(5)
    health = engine.health()
    assert (health.ready, health.alive) == (False, False)
    assert "DeviceLost" in health.reason


def test_health_notices_that_nothing_moves(tiny_llm, monkeypatch) -> None:
    inner = tiny_llm().engine
    engine = AsyncEngine(inner)
    release = threading.Event()
    execute = inner.parts.runner.execute

    def stuck(schedule, on_launch):
        release.wait(20)
        return execute(schedule, on_launch)

    inner.parts.runner.execute = stuck
    monkeypatch.setattr("leadframe.engine.async_engine._STALL_SECONDS", 0.2)

    async def run() -> None:
        task = asyncio.create_task(_collect(engine, "r", [1], GREEDY))
        await _until(lambda: not engine.health().alive)
        assert "no step has ended" in engine.health().reason
        release.set()
        await task
        await _until(lambda: engine.health().alive)
        await engine.shutdown()

    asyncio.run(run())


def test_shutdown_lets_streams_finish_and_refuses_new_ones(tiny_llm) -> None:
    engine = AsyncEngine(tiny_llm().engine)

    async def run() -> None:
        task = asyncio.create_task(_collect(engine, "r", [1], LONG))
        await _until(lambda: engine.engine.num_running == 1)
        await engine.shutdown(drain_seconds=20)
        assert (await task)[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineDead):
            await _collect(engine, "late", [1], GREEDY)

    asyncio.run(run())


def test_shutdown_without_patience_aborts(tiny_llm) -> None:
    engine = AsyncEngine(tiny_llm().engine)

    async def run() -> None:
        task = asyncio.create_task(_collect(engine, "r", [1], LONG))
        await _until(lambda: engine.engine.num_running == 1)
        await engine.shutdown()
        assert (await asyncio.wait_for(task, 5))[-1].finish_reason is FinishReason.ABORT

    asyncio.run(run())


def test_a_thousand_random_aborts_leave_nothing_behind(engine) -> None:
    async def one(i: int) -> None:
        task = asyncio.create_task(_collect(engine, f"r{i}", [i % 250, 3, 4], LONG))
        await asyncio.sleep((i * 7919 % 23) / 4000)
        if i % 3:
            await engine.abort(f"r{i}")
        else:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run() -> None:
        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(i) for i in range(start, start + 50)))
        await _until(lambda: not engine.engine.has_work)
        await engine.run_in_engine(engine.engine.check)

    asyncio.run(run())
    metrics, kv = engine.metrics, engine.engine.parts.scheduler.kv
    assert kv.num_free_blocks == kv.num_blocks
    assert (metrics.running.value, metrics.waiting.value, metrics.kv_usage.value) == (0, 0, 0)
    assert sum(metrics.finished.counts.values()) == 1000
    assert not engine.engine._requests
