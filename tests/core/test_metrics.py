"""Metrics: meaning of each series, conservation over random lives, and harmlessness."""

import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from leadframe.metrics import EngineMetrics, StartupLedger
from leadframe.request import FinishReason, Request, RequestTimes
from leadframe.sampling_params import SamplingParams


def make_request(request_id="r", num_prompt=3, arrival=100.0, scheduled=None):
    request = Request(
        request_id=request_id,
        prompt_token_ids=[1] * num_prompt,
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_total_tokens=64,
    )
    request.times = RequestTimes(arrival=arrival, first_scheduled=scheduled)
    return request


def finish(metrics, request, reason, at):
    request.finish_reason, request.times.finished = reason, at
    metrics.on_finished(request)


def samples(metrics):
    """Every sample as {(name, sorted labels but model_name): value}."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name.removeprefix("leadframe_"), tuple(sorted(labels.items()))] = (
                sample.value
            )
    return found


def value(metrics, name, **labels):
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def test_one_request_gives_the_times_of_the_glossary():
    metrics = EngineMetrics()
    request = make_request(num_prompt=5, arrival=100.0, scheduled=101.0)
    metrics.on_arrival(request)
    for now in (103.0, 103.5, 105.0):
        metrics.on_tokens(request, 1, now)
    finish(metrics, request, FinishReason.STOP, 105.25)
    expected = {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (2, 2.0),
        "request_time_per_output_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 5.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 4.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 2.0),
        "request_prompt_tokens": (1, 5),
        "request_generation_tokens": (1, 3),
    }
    for name, (count, total) in expected.items():
        assert value(metrics, name + "_count") == count, name
        assert value(metrics, name + "_sum") == pytest.approx(total), name
    assert value(metrics, "prompt_tokens_total") == 5
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "request_success_total", finished_reason="stop") == 1


def test_tokens_that_come_out_together_share_their_gap():
    metrics = EngineMetrics()
    request = make_request()
    metrics.on_arrival(request)
    metrics.on_tokens(request, 1, 101.0)
    metrics.on_tokens(request, 4, 103.0)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 4
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.4") == 0


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_is_counted_once(reason):
    metrics = EngineMetrics()
    request = make_request()
    metrics.on_arrival(request)
    finish(metrics, request, reason, 101.0)
    metrics.on_finished(request)
    counts = {
        other: value(metrics, "request_success_total", finished_reason=other.value)
        for other in FinishReason
    }
    assert counts == {other: float(other is reason) for other in FinishReason}


def test_tokens_after_the_end_are_not_counted():
    metrics = EngineMetrics()
    request = make_request()
    metrics.on_arrival(request)
    finish(metrics, request, FinishReason.ABORT, 101.0)
    metrics.on_tokens(request, 1, 102.0)
    assert value(metrics, "generation_tokens_total") == 0


LIVES = st.lists(
    st.tuples(
        st.integers(1, 50),  # prompt tokens
        st.lists(st.tuples(st.integers(1, 3), st.floats(0, 3)), max_size=6),  # (count, gap)
        st.one_of(st.none(), st.floats(0, 2)),  # queue time, or never scheduled
        st.sampled_from(FinishReason),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(LIVES)
def test_counters_and_histograms_agree_once_idle(lives):
    metrics = EngineMetrics()
    for index, (num_prompt, tokens, queue, reason) in enumerate(lives):
        scheduled = None if queue is None else 100.0 + queue
        request = make_request(str(index), num_prompt, 100.0, scheduled)
        metrics.on_arrival(request)
        now = 100.0 + (queue or 0.0)
        for count, gap in tokens:
            now += gap
            metrics.on_tokens(request, count, now)
        finish(metrics, request, reason, now + 0.5)
    got = samples(metrics)

    def of(name):
        return got[name, ()]

    ended = sum(v for (name, _), v in got.items() if name == "request_success_total")
    assert ended == len(lives)
    for name in (
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_decode_time_seconds",
    ):
        assert of(name + "_count") == len(lives)
    assert of("prompt_tokens_total") == of("request_prompt_tokens_sum")
    assert of("generation_tokens_total") == of("request_generation_tokens_sum")
    with_tokens = sum(1 for life in lives if life[1])
    assert of("time_to_first_token_seconds_count") == with_tokens
    assert of("inter_token_latency_seconds_count") == of("generation_tokens_total") - with_tokens
    parts = sum(of(f"request_{p}_time_seconds_sum") for p in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(of("e2e_request_latency_seconds_sum"))
    served = sum(of(f"request_{p}_time_seconds_sum") for p in ("prefill", "decode"))
    assert served == pytest.approx(of("request_inference_time_seconds_sum"))
    assert of("inter_token_latency_seconds_sum") == pytest.approx(
        of("request_decode_time_seconds_sum")
    )
    assert of("oldest_request_age_seconds") == 0
    assert of("metrics_errors_total") == 0


def test_oldest_age_follows_the_oldest_request(monkeypatch):
    metrics = EngineMetrics()
    monkeypatch.setattr("leadframe.metrics.engine_metrics.time.monotonic", lambda: 110.0)
    old, new = make_request("old", arrival=100.0), make_request("new", arrival=108.0)
    metrics.on_arrival(new)
    metrics.on_arrival(old)
    assert value(metrics, "oldest_request_age_seconds") == 10
    metrics.on_finished(old)
    assert value(metrics, "oldest_request_age_seconds") == 2
    metrics.on_finished(new)
    assert value(metrics, "oldest_request_age_seconds") == 0


def test_step_sets_gauges_and_takes_prefix_totals():
    metrics = EngineMetrics(model_name="m")
    metrics.on_step(40, 3, 2, 0.5, 100, 60, 1, 0.02)
    metrics.on_step(8, 4, 0, 0.75, 150, 80, 0, 0.01)
    assert value(metrics, "num_requests_running") == 4
    assert value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0.75
    assert value(metrics, "prefix_cache_queries_total") == 150
    assert value(metrics, "prefix_cache_hits_total") == 80
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "iteration_tokens_sum") == 48
    assert value(metrics, "iteration_tokens_count") == 2
    assert value(metrics, "step_time_seconds_sum") == pytest.approx(0.03)
    metrics.on_load(0, 0, 0.0)
    assert value(metrics, "num_requests_running") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert b'leadframe_num_requests_running{model_name="m"} 0.0' in metrics.render()


def test_single_events_reach_their_series():
    metrics = EngineMetrics()
    metrics.on_recomputed(12)
    metrics.on_rejected("queue_full")
    metrics.on_loop_lag(0.25)
    metrics.on_audit(3)
    metrics.set_info("engine_info", {"device": "cpu:0", "dtype": "float32"})
    metrics.set_info("cache_config_info", {"block_size": "16"})
    assert value(metrics, "recomputed_tokens_total") == 12
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 1
    assert value(metrics, "event_loop_lag_seconds") == 0.25
    assert value(metrics, "leaked_blocks") == 3
    assert value(metrics, "engine_info", device="cpu:0", dtype="float32") == 1
    assert value(metrics, "cache_config_info", block_size="16") == 1


def test_a_failing_metric_fails_nobody_and_is_counted(caplog):
    metrics = EngineMetrics()
    with caplog.at_level(logging.ERROR):
        metrics.on_finished(None)
        metrics.on_arrival(object())
    assert value(metrics, "metrics_errors_total") == 2
    assert len(caplog.records) == 1
    metrics.on_step(1, 1, 0, 0.1)
    assert value(metrics, "num_requests_running") == 1


def test_every_series_is_prefixed_and_documented():
    metrics = EngineMetrics(ledger=StartupLedger())
    text = metrics.render().decode()
    for line in text.splitlines():
        assert re.match(r"(# (HELP|TYPE) )?leadframe_", line), line
    assert all(len(line.split(" ", 3)[3]) > 5 for line in text.splitlines() if "# HELP" in line)


def test_every_sample_names_the_model():
    metrics = EngineMetrics("m", StartupLedger())
    metrics.set_info("engine_info", {"device": "cpu:0"})
    for line in metrics.render().decode().splitlines():
        assert line.startswith("#") or 'model_name="m"' in line, line


def test_events_from_many_threads_are_not_lost():
    from concurrent.futures import ThreadPoolExecutor

    metrics = EngineMetrics()

    def work(base):
        for i in range(300):
            request = make_request(f"{base}-{i}")
            metrics.on_arrival(request)
            metrics.on_tokens(request, 2, 101.0)
            finish(metrics, request, FinishReason.ABORT, 102.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert value(metrics, "generation_tokens_total") == 2400
    assert value(metrics, "request_success_total", finished_reason="abort") == 1200


def test_the_documentation_names_every_series_and_no_other():
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    tables = text[text.index("## Metrics") :]
    documented = {
        name
        for line in tables.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    metrics = EngineMetrics(ledger=StartupLedger())
    metrics.set_info("engine_info", {"device": "cpu:0"})
    metrics.set_info("cache_config_info", {"block_size": "16"})
    exposed = re.findall(r"# TYPE leadframe_(\w+) ", metrics.render().decode())
    assert documented == set(exposed)
