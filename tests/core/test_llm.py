"""Offline generation: overlapping calls, exceptions in callbacks, odd prompts, closing."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest

from leadframe import LLM, SamplingParams
from leadframe.config import SchedulerConfig
from leadframe.errors import ConfigError, EngineDead, RequestError
from leadframe.llm import engine_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_interleaved_streams_get_their_own_outputs(tiny_llm) -> None:
    llm = tiny_llm()
    expected = [c.token_ids for c in llm.generate(["hello", "world"], GREEDY)]
    streams = [llm.stream("hello", GREEDY), llm.stream("world", GREEDY)]
    got: list[list[int]] = [[], []]
    for _ in range(12):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += next(stream).token_ids
    assert got == expected


def test_a_held_stream_does_not_disturb_generate(tiny_llm) -> None:
    llm = tiny_llm()
    alone = llm.generate("world", GREEDY)[0].token_ids
    stream = llm.stream("hello", GREEDY)
    first = next(stream).token_ids
    assert llm.generate("world", GREEDY)[0].token_ids == alone
    rest = [t for output in stream for t in output.token_ids]
    assert [*first, *rest] == llm.generate("hello", GREEDY)[0].token_ids


def test_generate_inside_a_callback(tiny_llm) -> None:
    llm = tiny_llm()
    inner: list[list[int]] = []

    def nested(output) -> None:
        if not inner:
            inner.append(llm.generate("world", GREEDY)[0].token_ids)

    outer = llm.generate("hello", GREEDY, on_output=nested)[0].token_ids
    assert inner == [llm.generate("world", GREEDY)[0].token_ids]
    assert outer == llm.generate("hello", GREEDY)[0].token_ids


def test_threads_share_one_engine(tiny_llm) -> None:
    llm = tiny_llm()
    prompts = [[i + 1] * 5 for i in range(4)]
    expected = [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
    got: dict[int, list[int]] = {}

    def work(index: int) -> None:
        got[index] = llm.generate(prompts[index], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(4)] == expected


def test_a_call_that_leaves_does_not_keep_the_last_output_of_another(tiny_llm) -> None:
    llm = tiny_llm()
    llm.engine.overlaps = True
    mail: deque = deque()
    stays, _ = llm._add([1, 2, 3], SamplingParams(temperature=0, max_tokens=3), mail)
    leaves, _ = llm._add([9] * 10, SamplingParams(temperature=0, max_tokens=90), deque())
    live = llm.engine.parts.scheduler._requests
    while stays in live:
        llm._advance()
    assert not any(output.finished for output in mail)
    llm._forget([leaves])
    assert mail[-1].finished
    assert sum(len(output.token_ids) for output in mail) == 3


@pytest.mark.parametrize("prompts", [["a", None], ["a", "\ud800"], ["a", [1.5]]])
def test_a_failing_call_leaves_nothing_behind(tiny_llm, prompts) -> None:
    llm = tiny_llm()
    expected = llm.generate("a", GREEDY)[0].token_ids
    with pytest.raises((RequestError, TypeError)):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work
    assert llm.generate("a", GREEDY)[0].token_ids == expected


def test_an_exception_in_a_callback_leaves_nothing_behind(tiny_llm) -> None:
    llm = tiny_llm()

    def broken(output) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b"], GREEDY, on_output=broken)
    assert not llm.engine.has_work
    assert llm.engine.parts.scheduler.kv.usage == 0
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 12


def test_numpy_ids_are_ids(tiny_llm) -> None:
    llm = tiny_llm()
    expected = llm.generate([1, 2, 3], GREEDY)[0].token_ids
    assert llm.generate(np.array([1, 2, 3]), GREEDY)[0].token_ids == expected
    assert llm.generate([[np.int64(1), 2, 3]], GREEDY)[0].token_ids == expected


def test_a_dict_is_not_taken_for_a_list_of_its_keys(tiny_llm) -> None:
    llm = tiny_llm()
    for prompts in ({"prompt_token_ids": [5, 6]}, [{"prompt": "a"}]):
        with pytest.raises(RequestError, match="give text, or a list of token ids"):
            llm.generate(prompts)


def test_use_after_close_says_so(tiny_llm) -> None:
    llm = tiny_llm()
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineDead, match="closed"):
        next(stream)


def test_a_kv_cache_larger_than_the_device_is_refused_at_start(tiny_model) -> None:
    for size in (2**42, 2**47):
        with pytest.raises(ConfigError, match="lower --kv-cache-memory-bytes"):
            LLM(str(tiny_model), device="reference", kv_cache_memory_bytes=size)


def test_more_ranks_than_the_device_has_are_refused(tiny_model) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 2"):
        LLM(str(tiny_model), device="reference", tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "long_prefill_token_threshold"])
def test_negative_limits_are_refused(name) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        SchedulerConfig(**{name: -1})


def test_an_unknown_setting_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config(None, max_num_seq=3)
    assert engine_config(None, max_num_seqs=3).scheduler.max_num_seqs == 3


def test_the_metrics_tell_what_became_of_the_cache(tiny_model) -> None:
    with LLM(
        str(tiny_model), device="reference", block_size=16, num_blocks_override=9,
        gpu_memory_utilization=0.25, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        text = llm.engine.metrics.render().decode()
    (line,) = [x for x in text.splitlines() if x.startswith("leadframe_cache_config_info{")]
    for label, value in (
        ("block_size", "16"),
        ("num_gpu_blocks", "9"),
        ("gpu_memory_utilization", "0.25"),
        ("enable_prefix_caching", "False"),
        ("cache_dtype", "float32"),
    ):
        assert f'{label}="{value}"' in line
    assert line.endswith("} 1.0")
