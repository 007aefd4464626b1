"""What the engine counts about requests and steps.

Names follow the field: a series of vLLM is, where it exists here, the same one after `vllm:` is
replaced by `leadframe_`.

Conservation, which tests hold: every request that arrived is counted once in
`request_success_total` when it ends, whatever the reason (`stop`, `length`, `abort`, `error`), and
gives one observation to each `request_*` histogram and to `e2e_request_latency_seconds`, aborts
and errors included. Therefore, whenever no request is in flight:

* `prompt_tokens_total` equals the sum of `request_prompt_tokens`;
* `generation_tokens_total` equals the sum of `request_generation_tokens`;
* queue, prefill and decode time add up to `e2e_request_latency_seconds`, and the last two to
  `request_inference_time_seconds`;
* `inter_token_latency_seconds` has one observation for each generated token but the first of each
  request, and its sum is that of `request_decode_time_seconds`.

Two histograms leave requests out by definition: `time_to_first_token_seconds` those that never
produced a token, `request_time_per_output_token_seconds` those that produced fewer than two.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from leadframe.metrics.instruments import (
    PREFIX,
    Counter,
    Gauge,
    Histogram,
    Instrument,
    LabelledCounter,
)
from leadframe.metrics.ledger import StartupLedger
from leadframe.request import FinishReason, Request
from leadframe.structured_outputs import KINDS

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# fmt: off
_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
         160, 640, 2560)
_PER_TOKEN = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5,
              7.5, 10, 20, 40, 80)
_WHOLE = (.05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
          960, 1920, 7680)
_STEP = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
# fmt: on

P = ParamSpec("P")


def _never_fails(
    method: Callable[Concatenate[EngineMetrics, P], None],
) -> Callable[Concatenate[EngineMetrics, P], None]:
    """Makes an event of `EngineMetrics` atomic, and keeps its failure away from the caller."""

    @functools.wraps(method)
    def guarded(self: EngineMetrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with self._lock:
            try:
                method(self, *args, **kwargs)
            except Exception:
                if self.errors.value == 0:
                    logger.exception("a metric could not be updated; later ones are only counted")
                self.errors.value += 1

    return guarded


@dataclass(slots=True)
class _InFlight:
    """What is remembered of a request between its arrival and its end; monotonic seconds."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0


class EngineMetrics(Collector):
    """Counts events of the engine and renders them for Prometheus.

    Events may come from any thread. None of them raises.

    Args:
      model_name: the `model_name` label of every series.
      ledger: start-up phases to export besides.
    """

    def __init__(self, model_name: str = "", ledger: StartupLedger | None = None) -> None:
        self.model_name = model_name
        self._lock = threading.Lock()
        self._in_flight: dict[str, _InFlight] = {}
        self._infos: dict[str, dict[str, str]] = {}
        self._ledger = ledger
        self._make_gauges()
        self._make_counters()
        self._make_histograms()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def _make_gauges(self) -> None:
        self.running = Gauge("num_requests_running", "Requests that hold blocks.")
        self.waiting = Gauge("num_requests_waiting", "Requests that wait for blocks.")
        self.kv_usage = Gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.oldest_age = Gauge(
            "oldest_request_age_seconds", "Age of the oldest request in flight; 0 when idle."
        )
        self.leaked_blocks = Gauge(
            "leaked_blocks", "Blocks that no request holds and that are not free."
        )
        self.loop_lag = Gauge(
            "event_loop_lag_seconds", "How late the HTTP event loop ran its last timer."
        )

    def _make_counters(self) -> None:
        self.prompt_tokens = Counter(
            "prompt_tokens",
            "Tokens of prompts: counted at the first output token, or at the end without one.",
        )
        self.cached_tokens = Counter(
            "prompt_tokens_cached", "Of prompt_tokens, those that the prefix cache served."
        )
        self.generation_tokens = Counter("generation_tokens", "Tokens generated.")
        self.structured = LabelledCounter(
            "structured_requests",
            "Requests whose text had to match a constraint, by its kind.",
            "constraint",
            KINDS,
        )
        self.finished = LabelledCounter(
            "request_success",
            "Requests that ended, for whatever reason.",
            "finished_reason",
            [reason.value for reason in FinishReason],
        )
        self.rejections = LabelledCounter(
            "admission_rejections", "Requests refused on arrival.", "reason", ["queue_full"]
        )
        self.preemptions = Counter("num_preemptions", "Times a request lost all its blocks.")
        self.recomputed_tokens = Counter(
            "recomputed_tokens", "Tokens computed again because of a preemption."
        )
        self.prefix_queries = Counter("prefix_cache_queries", "Tokens looked up for reuse.")
        self.prefix_hits = Counter("prefix_cache_hits", "Tokens found for reuse.")
        self.late_compiles = Counter(
            "late_compiles",
            "Steps compiled or captured after start-up, while every request waited.",
        )
        self.errors = Counter("metrics_errors", "Updates of metrics that failed.")

    def _make_histograms(self) -> None:
        def seconds(name: str, help: str, bounds: tuple[float, ...] = _WHOLE) -> Histogram:
            return Histogram(name + "_seconds", help, bounds)

        self.ttft = seconds("time_to_first_token", "Arrival to first token.", _TTFT)
        self.itl = seconds("inter_token_latency", "Gap before a token, one a token.", _PER_TOKEN)
        self.tpot = seconds(
            "request_time_per_output_token",
            "(e2e - TTFT) / (output tokens - 1), one a request.",
            _PER_TOKEN,
        )
        self.e2e = seconds("e2e_request_latency", "Arrival to last token.")
        self.queue_time = seconds("request_queue_time", "Arrival to first scheduled.")
        self.inference_time = seconds("request_inference_time", "First scheduled to last token.")
        self.prefill_time = seconds("request_prefill_time", "First scheduled to first token.")
        self.decode_time = seconds("request_decode_time", "First token to last token.")
        self.step_time = seconds("step_time", "Duration of an engine step.", _STEP)
        self.step_tokens = Histogram("iteration_tokens", "Tokens computed in a step.", _STEP_TOKENS)
        self.request_prompt = Histogram("request_prompt_tokens", "Tokens a prompt.", _LENGTHS)
        self.request_generation = Histogram(
            "request_generation_tokens", "Tokens generated a request.", _LENGTHS
        )

    @_never_fails
    def on_arrival(self, request: Request) -> None:
        """Takes note of a request that the scheduler accepted."""
        self._in_flight[request.request_id] = _InFlight(request.times.arrival)
        if request.params.wanted is not None:
            self.structured.add(request.params.wanted.kind)

    @_never_fails
    def on_rejected(self, reason: str) -> None:
        """Counts a request that was refused on arrival; `reason` is from a fixed set."""
        self.rejections.add(reason)

    @_never_fails
    def on_step(
        self,
        num_tokens: int,
        running: int,
        waiting: int,
        kv_usage: float,
        prefix_queries: int = 0,
        prefix_hits: int = 0,
        preempted: int = 0,
        step_seconds: float = 0.0,
    ) -> None:
        """Takes note of a finished step.

        Args:
          num_tokens: tokens computed, prefill and decode.
          running: requests that hold blocks now.
          waiting: requests that wait now.
          kv_usage: share of blocks in use, [0, 1].
          prefix_queries: tokens looked up in the prefix cache since start-up.
          prefix_hits: tokens found there since start-up.
          preempted: requests preempted in this step.
          step_seconds: duration of the step.
        """
        self._set_load(running, waiting, kv_usage)
        self.step_tokens.observe(num_tokens)
        self.step_time.observe(step_seconds)
        self.prefix_queries.raise_to(prefix_queries)
        self.prefix_hits.raise_to(prefix_hits)
        self.preemptions.value += preempted

    @_never_fails
    def on_late_compile(self) -> None:
        """Counts a step that was made ready while requests waited for it."""
        self.late_compiles.value += 1

    @_never_fails
    def on_recomputed(self, num_tokens: int) -> None:
        """Counts tokens of a step that were computed before and lost to a preemption."""
        self.recomputed_tokens.value += num_tokens

    @_never_fails
    def on_load(self, running: int, waiting: int, kv_usage: float) -> None:
        """Takes the load between steps, so that gauges are right after an abort."""
        self._set_load(running, waiting, kv_usage)

    @_never_fails
    def on_tokens(self, request: Request, count: int, now: float) -> None:
        """Takes note of new tokens of a request.

        Args:
          request: the request.
          count: tokens that came out together, at least 1.
          now: monotonic seconds.
        """
        state = self._in_flight.get(request.request_id)
        if state is None or count < 1:
            return
        self.generation_tokens.value += count
        state.num_tokens += count
        if state.last_token is None:
            state.first_token = state.last_token = now
            self.ttft.observe(now - state.arrival)
            self._count_prompt(request)
            count -= 1
        if count:
            self.itl.observe((now - state.last_token) / count, count)
            state.last_token = now

    @_never_fails
    def on_finished(self, request: Request) -> None:
        """Counts the end of a request; a second call for the same one does nothing."""
        state = self._in_flight.pop(request.request_id, None)
        if state is None:
            return
        reason = request.finish_reason or FinishReason.ERROR
        self.finished.add(reason.value)
        if state.first_token is None:
            self._count_prompt(request)
        self.request_prompt.observe(request.num_prompt_tokens)
        self.request_generation.observe(state.num_tokens)
        self._observe_times(request, state)

    @_never_fails
    def on_loop_lag(self, seconds: float) -> None:
        """Takes how late the event loop ran a timer."""
        self.loop_lag.value = seconds

    @_never_fails
    def on_audit(self, leaked_blocks: int) -> None:
        """Takes the result of a check of the block pool."""
        self.leaked_blocks.value = leaked_blocks

    @_never_fails
    def set_info(self, name: str, info: Mapping[str, str]) -> None:
        """Sets the labels of a series of value 1, such as `engine_info` or `cache_config_info`."""
        self._infos[name] = dict(info)

    def render(self) -> bytes:
        """Returns the exposition text, in Prometheus' format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields a consistent snapshot, for the registry."""
        labels, values = ["model_name"], [self.model_name]
        with self._lock:
            self.oldest_age.value = self._oldest_age()
            families = [item.family(labels, values) for item in self._instruments()]
            families += [self._info_family(name, info) for name, info in self._infos.items()]
        yield from families
        if self._ledger is not None:
            yield from self._ledger.families(labels, values)

    def _info_family(self, name: str, info: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + name, "1; the labels are the facts.", labels=["model_name", *info]
        )
        family.add_metric([self.model_name, *info.values()], 1)
        return family

    def _instruments(self) -> list[Instrument]:
        return [item for item in vars(self).values() if isinstance(item, Instrument)]

    def _set_load(self, running: int, waiting: int, kv_usage: float) -> None:
        self.running.value, self.waiting.value, self.kv_usage.value = running, waiting, kv_usage

    def _oldest_age(self) -> float:
        arrivals = [state.arrival for state in self._in_flight.values()]
        return max(0.0, time.monotonic() - min(arrivals)) if arrivals else 0.0

    def _count_prompt(self, request: Request) -> None:
        self.prompt_tokens.value += request.num_prompt_tokens
        self.cached_tokens.value += request.num_cached_tokens

    def _observe_times(self, request: Request, state: _InFlight) -> None:
        """Splits arrival to end into queue, prefill and decode, which add up whatever happened."""
        times = request.times
        ended = time.monotonic() if times.finished is None else times.finished
        last = ended if state.last_token is None else state.last_token
        first = last if state.first_token is None else state.first_token
        scheduled = first if times.first_scheduled is None else min(times.first_scheduled, first)
        self.e2e.observe(last - state.arrival)
        self.queue_time.observe(scheduled - state.arrival)
        self.inference_time.observe(last - scheduled)
        self.prefill_time.observe(first - scheduled)
        self.decode_time.observe(last - first)
        if state.num_tokens > 1:
            self.tpot.observe((last - first) / (state.num_tokens - 1))
