"""One model shared by processes on the host: the same answers, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from leadframe import LLM, SamplingParams
from leadframe.engine import AsyncEngine, Engine
from leadframe.engine.ranks import start
from leadframe.errors import ConfigError, DeviceLost, ModelNotFound
from leadframe.llm import engine_config

SMALL = {
    "device": "cpu",
    "options": {"threads": "1"},
    "block_size": 16,
    "num_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
SHARED = list(range(40, 76))
PROMPTS = [[*SHARED, 1, 2], [*SHARED, 9], [5, 6, 7], [*SHARED, 4, 4], list(range(90, 120))]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=7, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0),
]


def two_ranks(path: Path, **settings) -> dict:
    return {"model": str(path), "tensor_parallel_size": 2, **SMALL, **settings}


def workers(llm: LLM) -> list[int]:
    return [peer.process.pid for peer in llm.engine.parts.backend.group._peers]


def is_there(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to look does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def children(parent: int) -> list[int]:
    """The processes that one started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_there(pid)]


def assert_same(found, want) -> None:
    for one, other in zip(found, want, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(one, name) or [], getattr(other, name) or []
            for a, b in zip(mine, theirs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_two_ranks_answer_as_one_device(tiny_model, tiny_llm) -> None:
    """Chunks, shared prefixes, preemption and sampling, with the KV heads cut in two."""
    with LLM(str(tiny_model), **SMALL, enable_prefix_caching=False) as alone:
        want = [alone.generate([p], a)[0] for p, a in zip(PROMPTS, ASKED, strict=True)]
        line = alone.engine.capacity_line
    settings = two_ranks(tiny_model, num_blocks_override=11, max_num_batched_tokens=24)
    del settings["model"]
    with tiny_llm(**settings, max_model_len=64) as llm:
        assert_same(llm.generate(PROMPTS, ASKED), want)
        assert llm.engine.metrics.preemptions.value > 0
        assert llm.engine.parts.scheduler.kv.prefix_hits > 0
        assert "over 2 ranks" in llm.engine.capacity_line
        assert "over" not in line
        assert llm.engine.device_summary.endswith("; 2 ranks)")
        check_blocks(llm.engine)
        pids = workers(llm)
        rendezvous = llm.engine.parts.backend.group._rendezvous
        assert os.stat(rendezvous).st_mode & 0o077 == 0, "only for this user"
        assert all(map(is_there, pids))
    wait_until_gone(pids, 0.0)
    assert not Path(rendezvous).exists()


def check_blocks(engine: Engine) -> None:
    """What is written to all heads of some blocks, each rank holding its own, is read again."""
    backend, runner = engine.parts.backend, engine.parts.runner
    data = np.random.default_rng(0).standard_normal((2, 2, 16, 2, 8)).astype(np.float32)
    runner._kv[1] = backend.kv_write(runner._kv[1], [3, 5], data)
    np.testing.assert_array_equal(backend.kv_read(runner._kv[1], [5, 3]), data[::-1])
    runner.scrub([3])
    assert not backend.kv_read(runner._kv[1], [3]).any()
    np.testing.assert_array_equal(backend.kv_read(runner._kv[1], [5]), data[1:])


def test_a_rank_that_dies_in_a_step_ends_the_engine(tiny_model) -> None:
    with LLM(**two_ranks(tiny_model)) as llm:
        (pid,) = workers(llm)

        def kill(output) -> None:
            if len(output.token_ids) and is_there(pid):
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(DeviceLost, match=rf"rank 1 \(process {pid}\) was ended by signal 9"):
            llm.generate(PROMPTS, ASKED[0], on_output=kill)
        with pytest.raises(DeviceLost, match="rank 1"):
            llm.generate(PROMPTS)
    wait_until_gone([pid], 0.0)


def test_a_rank_that_dies_while_nothing_runs_ends_the_engine(tiny_model) -> None:
    async def run() -> None:
        died = threading.Event()
        inner = Engine.from_config(engine_config(**two_ranks(tiny_model)))
        engine = AsyncEngine(inner, on_death=lambda error: died.set())
        (peer,) = inner.parts.backend.group._peers
        os.kill(peer.process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(died.wait, 20)
        assert "DeviceLost: one of 2 ranks is lost: rank 1" in engine.health().reason
        await engine.shutdown()

    asyncio.run(run())


def test_a_rank_that_cannot_start_says_why(tiny_model, monkeypatch) -> None:
    fields = start.config_fields
    elsewhere = "/nowhere/model"
    monkeypatch.setattr(
        start, "config_fields", lambda c: fields(dataclasses.replace(c, model=elsewhere))
    )
    with pytest.raises(ModelNotFound, match=rf"rank 1 \(process \d+\): .*{elsewhere}"):
        LLM(**two_ranks(tiny_model))


def test_what_cannot_be_shared_is_refused_before_a_process_starts(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr("leadframe.engine.ranks.group.start_process", None)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 3, and .* has 320 rows"):
        LLM(**two_ranks(tiny_model) | {"tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="compile=step"):
        LLM(**two_ranks(tiny_model, options={"compile": "step"}))


@pytest.mark.slow
def test_more_ranks_than_kv_heads_share_them(tiny_model) -> None:
    with LLM(str(tiny_model), **SMALL) as alone:
        want = alone.generate(PROMPTS, ASKED)
    with LLM(**two_ranks(tiny_model) | {"tensor_parallel_size": 4}) as llm:
        assert_same(llm.generate(PROMPTS, ASKED), want)
        check_blocks(llm.engine)


@pytest.mark.slow
def test_the_batch_does_not_change_a_bit_with_more_than_two_ranks(tiny_model) -> None:
    """Text, log-probabilities and seeded draws alone are those among others, though preempted."""
    settings = two_ranks(tiny_model, num_blocks_override=11, max_num_batched_tokens=24)
    settings |= {"tensor_parallel_size": 4, "max_model_len": 64, "enable_prefix_caching": False}
    with LLM(**settings) as llm:
        assert llm.engine.parts.backend.caps.batch_invariant
        alone = [llm.generate([p], a)[0] for p, a in zip(PROMPTS, ASKED, strict=True)]
        together = llm.generate(PROMPTS, ASKED)
        assert llm.engine.metrics.preemptions.value > 0
        for one, other in zip(together, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.slow
def test_three_ranks_serve_the_default_model() -> None:
    prompts = ["The capital of France is", "1, 1, 2, 3, 5, 8,"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    settings = SMALL | {"num_blocks_override": 32}
    with LLM(**settings) as alone:
        want = alone.generate(prompts, greedy)
    with LLM(tensor_parallel_size=3, **settings) as llm:
        assert_same(llm.generate(prompts, greedy), want)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


COMMAND = (
    "--device", "cpu", "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "1MiB",
    "-o", "threads=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_start_that_is_stopped_leaves_nothing(tiny_model, tmp_path, sent, status) -> None:
    command = [sys.executable, "-m", "leadframe.cli.main", "serve", str(tiny_model), "--port", "0"]
    process = subprocess.Popen(
        [*command, *COMMAND], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: list(tmp_path.glob("leadframe-*")) and children(process.pid))
        (pid,) = children(process.pid)
        process.send_signal(sent)
        assert process.wait(30) == status
    finally:
        process.kill()
        process.wait()
    wait_until_gone([pid])
    assert not list(tmp_path.glob("leadframe-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sent", "status"),
    [("server", signal.SIGINT, 0), ("server", signal.SIGKILL, -9), ("rank", signal.SIGKILL, 4)],
    ids=["ctrl-c", "rank 0 killed", "rank 1 killed"],
)
def test_no_process_outlives_a_server(serve, tiny_model, tmp_path, target, sent, status) -> None:
    with serve(str(tiny_model), *COMMAND, env={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        (pid,) = children(server.process.pid)
        assert list(tmp_path.glob("leadframe-*"))
        os.kill(server.process.pid if target == "server" else pid, sent)
        assert server.process.wait(30) == status
        wait_until_gone([pid])
        assert not list(tmp_path.glob("leadframe-*"))


@pytest.mark.slow
def test_two_groups_on_one_host_and_a_signal_to_every_process(serve, tiny_model, tmp_path) -> None:
    """Groups do not meet each other; a supervisor's SIGTERM, which ranks get too, drains."""
    body = {"prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0, "ignore_eos": True}

    def ask(server) -> str:
        return server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    env = {**os.environ, "TMPDIR": str(tmp_path)}
    start = (str(tiny_model), *COMMAND)
    with serve(*start, env=env) as one, serve(*start, env=env) as other:
        assert len(list(tmp_path.glob("leadframe-*"))) == 2
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(ask, (one, other) * 4))
        assert len(set(texts)) == 1
        pids = children(one.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        time.sleep(1.0)  # a loss would have been noticed
        assert one.http.get("/health").status_code == 200
        one.process.terminate()
        assert one.process.wait(30) == 0
        wait_until_gone(pids)
        assert len(list(tmp_path.glob("leadframe-*"))) == 1
        assert ask(other) == texts[0]
