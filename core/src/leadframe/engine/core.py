"""The step loop: `schedule → execute → update`, and the requests around it.

One thread drives an engine. It must not know devices, HTTP or asyncio.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leadframe.config import EngineConfig
from leadframe.engine.admission import RequestLimits, build_request
from leadframe.engine.output_processor import OutputProcessor, make_output
from leadframe.engine.outputs import RequestOutput, TokenLogprobs
from leadframe.engine.ranks import RankedBackend
from leadframe.errors import DeviceLost, DeviceOOM, EngineDead, QueueFull
from leadframe.grammar import GrammarCompiler
from leadframe.platform.backend import CompiledStep
from leadframe.platform.batch import Bucket
from leadframe.request import FinishReason, Request, TokenConstraint
from leadframe.runner.result import StepResult
from leadframe.runner.runner import OnLaunch
from leadframe.sampling_params import SamplingParams
from leadframe.scheduler import ScheduledRow, SchedulerOutput

if TYPE_CHECKING:
    from leadframe.engine.startup import EngineParts

logger = logging.getLogger(__name__)

_MAX_IDLE_STEPS = 1000
"""Steps in a row that schedule nothing while requests wait: the scheduler is stuck."""


@dataclass(slots=True)
class _Unsettled:
    """What a step sampled and what is not yet an output; one entry a row.

    Attributes:
      now: monotonic seconds at the end of the step.
      texts: what became of a token, by row, where the step had to know.
    """

    rows: Sequence[ScheduledRow]
    tokens: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None]
    now: float
    texts: dict[int, str] = field(default_factory=dict)


class Engine:
    """Serves requests on one device.

    Args:
      parts: what `leadframe.engine.startup.build_parts` made.

    Attributes:
      overlaps: outputs of a step are made while the device runs the next one.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.model_info = parts.model_info
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self.metrics = parts.metrics
        self.ledger = parts.ledger
        self.device_summary = parts.device_summary
        self.capacity_line = parts.kv_plan.line
        self.kv_plan = parts.kv_plan
        self.model_path = parts.model_path
        eos = frozenset(parts.model_info.eos_token_ids)
        self._limits = RequestLimits(parts.model_info.vocab_size, eos, parts.max_model_len)
        self.grammars = GrammarCompiler(parts.tokenizer, parts.model_info.vocab_size, eos)
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._runner.on_late = self._note_late
        self._processor = OutputProcessor(parts.tokenizer, eos)
        self._requests: dict[str, Request] = {}
        self._deciding: set[str] = set()
        self._unsettled: _Unsettled | None = None
        self._ready: list[RequestOutput] = []
        self._seeds = random.Random(parts.config.seed)
        self._idle_steps = 0
        self._has_preempted = False
        self.overlaps = parts.backend.caps.asynchronous
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig, **kwargs: Any) -> Engine:
        """Selects the device, loads the model and makes every step ready.

        Args:
          config: the settings.
          **kwargs: see `leadframe.engine.startup.build_parts`.
        """
        from leadframe.engine.startup import build_parts

        return cls(build_parts(config, **kwargs))

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._scheduler.has_work and not self._closed

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return self._scheduler.num_waiting

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        constraint: TokenConstraint | None = None,
    ) -> Request:
        """Checks and queues a request.

        Args:
          request_id: unique among live requests.
          prompt_token_ids: the prompt.
          params: how to sample.
          priority: lower runs sooner.
          cache_salt: separates prefix-cache entries.
          constraint: what `grammars` made of the parameters; None has it made here.

        Raises:
          RequestError: it cannot be served; nothing was queued.
        """
        if self._closed:
            raise EngineDead("the engine is closed; make a new one")
        if request_id in self._requests:
            raise EngineDead(f"request id {request_id!r} is in use")
        request = build_request(
            request_id,
            prompt_token_ids,
            params,
            self._limits,
            seed=self._seed(params),
            extra_stop_ids=frozenset(self._processor.special_stops(params)),
            priority=priority,
            cache_salt=cache_salt,
        )
        request.constraint = constraint
        if constraint is None and params.wanted is not None:
            request.constraint = self.grammars.compile(params.wanted, ignore_eos=params.ignore_eos)
        try:
            self._scheduler.add(request)
        except QueueFull:
            self.metrics.on_rejected("queue_full")
            raise
        self._processor.add(request)
        self._requests[request_id] = request
        if params.stop or request.constraint is not None:
            self._deciding.add(request_id)
        self.metrics.on_arrival(request)
        self._report_load()
        return request

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks; an id that is not live is ignored."""
        self._ready = self.settle()
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._scheduler.abort(request_id)
        self._processor.discard(request)
        output = self._retire(request, make_output(request))
        self._report_load()
        return output

    def abort_all(self) -> list[RequestOutput]:
        """Ends every live request."""
        outputs = [self.abort(request_id) for request_id in list(self._requests)]
        return [output for output in outputs if output is not None]

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns what is new, one output a request at most.

        Raises:
          PlatformError: the device failed in a way that concerns every request.
        """
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend)
        return outputs + self.settle()

    def advance(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        """Runs one step, and delivers the outputs of the one before while the device works.

        Outputs wait for the next launch, so that the device does not wait for them. Only text that
        decides the next schedule, by a stop string or a constraint, is looked at in its own step.
        Call `settle` when no step follows. A device that is not asynchronous would only make
        clients wait: there outputs are delivered at the end of their own step.

        Args:
          deliver: takes outputs, in this thread.

        Raises:
          PlatformError: the device failed in a way that concerns every request.
        """
        started = time.monotonic()
        schedule = self._scheduler.schedule()
        if not schedule.rows:
            self._note_idle(schedule)
            deliver(self.settle())
            return
        self._idle_steps = 0
        rows = schedule.rows

        def on_launch() -> None:
            deliver(self.settle())
            _note_scheduled(rows, started)

        schedule, result = self._execute(schedule, on_launch)
        self._update(schedule, result)
        self._report_step(schedule, time.monotonic() - started)
        if not self.overlaps:
            deliver(self.settle())

    def settle(self) -> list[RequestOutput]:
        """Makes and returns the outputs that no step has delivered yet."""
        outputs, self._ready = self._ready, []
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return outputs
        for index in range(len(unsettled.rows)):
            output = self._row_output(unsettled, index)
            if output is not None:
                outputs.append(output)
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix that no request holds."""
        self._scheduler.kv.reset_prefix_cache()

    def check(self) -> None:
        """Recomputes the invariants of scheduler and block pool; for tests and idle audits."""
        self._scheduler.check()

    def on_device_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Has a function called, from another thread, when one of several ranks is gone.

        A step finds out by itself; an idle engine takes none.
        """
        backend = self.parts.backend
        if isinstance(backend, RankedBackend):
            backend.group.on_lost = callback

    def close(self) -> None:
        """Frees the device; calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            self.grammars.close()
            self._runner.close()
            self.parts.backend.close()

    # --- execute ------------------------------------------------------------------------

    def _execute(
        self, schedule: SchedulerOutput, on_launch: OnLaunch
    ) -> tuple[SchedulerOutput, StepResult]:
        """Runs a schedule; out of memory, it preempts one request and tries once more.

        A request that is alone and does not fit fails; the engine goes on.
        """
        try:
            return schedule, self._run(schedule, on_launch)
        except DeviceOOM as error:
            if len(schedule.rows) == 1:
                self._fail(schedule.rows[0].request, str(error))
                return schedule, StepResult([None], [True], [None])
            self._scheduler.preempt_newest()
            retry = self._scheduler.schedule()
            if not retry.rows:
                raise
            return retry, self._run(retry, on_launch)

    def _run(self, schedule: SchedulerOutput, on_launch: OnLaunch) -> StepResult:
        """Runs a schedule; out of memory, the steps made while serving go before any request."""
        try:
            return self._runner.execute(schedule, on_launch)
        except DeviceOOM as error:
            if not self._runner.drop_late():
                raise
            logger.warning("%s; freed the steps that were made while serving", error)
        return self._runner.execute(schedule, on_launch)

    # --- update -------------------------------------------------------------------------

    def _update(self, schedule: SchedulerOutput, result: StepResult) -> None:
        now = time.monotonic()
        sampled = list(result.tokens)
        if self._deciding or not all(result.finite):
            self._drop_failed(schedule, result, sampled)
        for row_index, position, entry in result.scored:
            self._processor.score(schedule.rows[row_index].request, position, entry)
        self._scheduler.update(schedule, sampled)
        self._ready = self.settle()  # something is left where nothing was launched
        self._unsettled = _Unsettled(schedule.rows, sampled, result.logprobs, now)
        if self._deciding:
            self._decide_rows(self._unsettled)

    def _drop_failed(
        self, schedule: SchedulerOutput, result: StepResult, sampled: list[int | None]
    ) -> None:
        """Fails the requests that cannot go on; what they sampled becomes None."""
        for index, row in enumerate(schedule.rows):
            failure = _failure(row, result.finite[index])
            if failure is not None:
                sampled[index] = None
                self._fail(row.request, failure)

    def _decide_rows(self, unsettled: _Unsettled) -> None:
        """Looks at the text of the requests that it may end."""
        for index, (row, token) in enumerate(zip(unsettled.rows, unsettled.tokens, strict=True)):
            if token is not None and row.request.request_id in self._deciding:
                unsettled.texts[index] = self._decide(row.request, token)

    def _decide(self, request: Request, token: int) -> str:
        """Takes the text of one token, and ends the request where that is its end."""
        try:
            text, matched = self._processor.token(request, token)
            if matched is not None:
                if request.is_finished:
                    request.finish_reason = FinishReason.STOP
                    request.stop_reason = matched
                else:
                    self._scheduler.finish(request, FinishReason.STOP, matched)
            elif request.constraint is not None:
                self._advance(request, request.constraint)
            return text
        except Exception as error:  # one request's text must not end the others
            self._fail(request, f"{type(error).__name__}: {error}")
            return ""

    def _advance(self, request: Request, constraint: TokenConstraint) -> None:
        """Ends a request whose output is complete; what is complete was not cut."""
        constraint.advance(request.output_token_ids)
        if not constraint.is_complete:
            return
        if request.finish_reason is FinishReason.LENGTH:
            request.finish_reason = FinishReason.STOP
        self._scheduler.finish(request, FinishReason.STOP)

    def _row_output(self, unsettled: _Unsettled, index: int) -> RequestOutput | None:
        request = unsettled.rows[index].request
        if request.request_id not in self._requests:
            return None
        try:
            return self._emit(request, unsettled, index)
        except Exception as error:  # nor may what is made of it
            self._fail(request, f"{type(error).__name__}: {error}")
            self._processor.discard(request)
            return self._retire(request, make_output(request))

    def _emit(self, request: Request, unsettled: _Unsettled, index: int) -> RequestOutput | None:
        token, logprobs = unsettled.tokens[index], unsettled.logprobs[index]
        if token is None and not request.is_finished:
            return None
        text = ""
        if token is not None:
            self._note_token(request, unsettled.now)
            decided = unsettled.texts.get(index)
            text = self._decide(request, token) if decided is None else decided
        prompt_logprobs = self._processor.take_prompt_logprobs(request)
        if request.is_finished:
            text += self._processor.finish(request)
        output = make_output(
            request,
            token_ids=() if token is None else (token,),
            text=text,
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
        )
        return self._retire(request, output) if request.is_finished else output

    def _note_token(self, request: Request, now: float) -> None:
        if request.times.first_token is None:
            request.times.first_token = now
        request.times.last_token = now
        self.metrics.on_tokens(request, 1, now)

    def _fail(self, request: Request, reason: str) -> None:
        if request.is_finished:
            return
        request.error = reason
        self._scheduler.finish(request, FinishReason.ERROR)
        self._runner.scrub(self._scheduler.take_discarded_blocks())

    def _retire(self, request: Request, output: RequestOutput) -> RequestOutput:
        request.times.finished = time.monotonic()
        self._requests.pop(request.request_id, None)
        self._deciding.discard(request.request_id)
        self.metrics.on_finished(request)
        if not self._requests:
            kv = self._scheduler.kv
            self.metrics.on_audit(leaked_blocks=kv.num_blocks - kv.num_free_blocks)
        return output

    # --- the rest -----------------------------------------------------------------------

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return self._seeds.getrandbits(63)

    def _note_idle(self, schedule: SchedulerOutput) -> None:
        self._report_step(schedule, 0.0)
        self._idle_steps += 1
        if self.has_work and self._idle_steps > _MAX_IDLE_STEPS:
            raise EngineDead(
                f"the scheduler chose nothing for {self._idle_steps} steps with "
                f"{self.num_running} running and {self.num_waiting} waiting requests"
            )

    def _note_late(self, bucket: Bucket, step: CompiledStep) -> None:
        seconds = step.compile_seconds + step.capture_seconds
        logger.warning("a step was made ready while serving, in %.2f s: %s", seconds, bucket)
        self.metrics.on_late_compile()

    def _report_load(self) -> None:
        self.metrics.on_load(self.num_running, self.num_waiting, self._scheduler.kv.usage)

    def _report_step(self, schedule: SchedulerOutput, seconds: float) -> None:
        kv = self._scheduler.kv
        self.metrics.on_step(
            schedule.num_tokens,
            self.num_running,
            self.num_waiting,
            kv.usage,
            prefix_queries=kv.prefix_queries,
            prefix_hits=kv.prefix_hits,
            preempted=len(schedule.preempted),
            step_seconds=seconds,
        )
        self._has_preempted |= bool(schedule.preempted)
        if self._has_preempted and (recomputed := _num_recomputed(schedule)):
            self.metrics.on_recomputed(recomputed)


def _note_scheduled(rows: Sequence[ScheduledRow], now: float) -> None:
    for row in rows:
        if row.request.times.first_scheduled is None:
            row.request.times.first_scheduled = now


def _failure(row: ScheduledRow, is_finite: bool) -> str | None:
    """Why a row's request has to end, if so."""
    if not is_finite:
        return "the model produced logits that are not finite"
    constraint = row.request.constraint
    return constraint.error if constraint is not None and row.samples else None


def _num_recomputed(schedule: SchedulerOutput) -> int:
    """Counts the tokens of a step that had been computed before a preemption."""
    return sum(
        max(0, min(row.start + row.num_tokens, row.request.num_lost_tokens) - row.start)
        for row in schedule.rows
        if row.request.num_lost_tokens
    )
