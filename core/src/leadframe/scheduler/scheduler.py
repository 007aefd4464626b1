"""The scheduler: which tokens of which request each step computes.

There is no prefill phase and no decode phase. Every request has tokens it knows and tokens that
are computed, and each step lets the second number catch up with the first, inside a token budget.

Knows requests and the KV cache manager. Must not know devices, batches, text or time.

Source: the rules follow vLLM v1/core/sched/scheduler.py, idea only; deferral is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from leadframe.config import SchedulerConfig
from leadframe.errors import InternalError, QueueFull, RequestError
from leadframe.kv_cache import KVCacheManager
from leadframe.request import FinishReason, Request, RequestStatus
from leadframe.scheduler.audit import check_queues
from leadframe.scheduler.limits import check_budget, check_fits, check_stop
from leadframe.scheduler.output import SchedulerOutput, make_row
from leadframe.scheduler.step_plan import StepPlan
from leadframe.scheduler.waiting import WaitingQueue

MAX_DEFERRED = 32
"""Waiting requests that one step may pass over because their prefix is being computed."""

MAX_SCORED_TOKENS = 256
"""Prompt tokens of one step whose log-probabilities are wanted: each costs a row of logits."""


class Scheduler:
    """Chooses the work of each step and keeps the queues.

    The order of a step:

    1. Running requests that need one token, oldest first. They always fit the budget. One that
       needs a block and finds none preempts the newest running request (by priority: the worst).
    2. Other running requests, oldest first, as many tokens as the budget leaves. One that gets
       none is skipped; it is no barrier.
    3. If nothing was preempted, waiting requests in order, while there is budget, a seat, and
       room for every token they know. The first that does not fit ends the step. One whose next
       block is being computed by a running request is *deferred*: passed over, so that it finds
       the block instead of computing it again. The wait is bounded, because running requests
       never wait: whoever computes the block gets tokens in every step that has budget left for
       admission at all, and if it goes away the block is no longer being computed.

    A schedule that is never passed to `update` changes nothing but who holds which blocks: the
    next one repeats it.

    Args:
      config: limits and policy.
      kv: the blocks; the scheduler is the only one that changes it.
      max_model_len: most tokens of prompt and output together.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> None:
        check_budget(config, max_model_len)
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self._by_priority = config.policy == "priority"
        self._waiting = WaitingQueue(by_priority=self._by_priority)
        self._running: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._num_watermark_blocks = int(config.watermark * kv.num_blocks)
        self._discarded: list[int] = []
        self._preempted: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks, in order of admission."""
        return list(self._running.values())

    @property
    def waiting(self) -> list[Request]:
        """Requests that hold none, in order of admission."""
        return list(self._waiting)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          PromptTooLong: it exceeds `max_model_len`, or all the blocks there are.
          QueueFull: too many requests are waiting.
          RequestError: it has no tokens, or its id is in use.
        """
        check_fits(request, self.max_model_len, self.kv)
        limit = self.config.max_num_queued_reqs
        if limit and len(self._waiting) >= limit:
            raise QueueFull(f"{limit} requests are waiting, the limit; try again later")
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another")
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request for its client; returns None, and does nothing, if it is not live."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """Ends a request and frees its blocks; harmless if it has ended.

        With `FinishReason.ERROR` its K/V is not trusted: nothing of it stays in the prefix cache,
        and the blocks that must be scrubbed are added to `take_discarded_blocks`. Call it before
        the `update` of the step that failed.
        """
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._discarded += self.kv.free(request, discard=reason is FinishReason.ERROR)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def take_discarded_blocks(self) -> list[int]:
        """Returns, once, the blocks to scrub before the next step."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def preempt_newest(self) -> Request | None:
        """Takes the blocks of the running request that would be preempted first, if any.

        The next `schedule` reports it, and admits nothing.
        """
        if not self._running:
            return None
        victim = self._choose_victim()
        self._preempt(victim)
        self._preempted.append(victim)
        return victim

    # --- schedule -----------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step's rows and gives them blocks."""
        plan = StepPlan(self.config.max_num_batched_tokens, MAX_SCORED_TOKENS)
        plan.preempted += self._preempted
        self._preempted = []
        for request in self._schedule_decodes(plan):
            if request.status is RequestStatus.RUNNING:
                count = self._chunk_size(plan, request, request.num_computed_tokens)
                if count:
                    plan.add(request, count, self.kv.table_rows[request.request_id])
        if not plan.preempted:
            self._admit_waiting(plan)
        return plan.output(self.kv.block_tables)

    def _schedule_decodes(self, plan: StepPlan) -> list[Request]:
        """Schedules the requests that need one token; returns those that need more."""
        block_size, table_rows, decodes = self.kv.block_size, self.kv.table_rows, plan.decodes
        others = []
        for request in list(self._running.values()):
            start = request.num_computed_tokens
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            if num_tokens - start != 1 or num_tokens == request.max_total_tokens:
                others.append(request)
            elif start % block_size or self._make_room(plan, request):
                row = table_rows[request.request_id]
                decodes.append(make_row((request, start, 1, True, row)))
        plan.budget -= len(decodes)
        return others

    def _admit_waiting(self, plan: StepPlan) -> None:
        num_seats = self.config.max_num_seqs - len(self._running)
        num_deferred = 0
        for request in self._waiting.first(num_seats + MAX_DEFERRED):
            if not plan.budget or not num_seats or num_deferred == MAX_DEFERRED:
                return
            num_cached = self._match_prefix(request)
            if num_cached is None:
                num_deferred += 1
            elif self._admit(plan, request, num_cached):
                num_seats -= 1
            else:
                return

    def _match_prefix(self, request: Request) -> int | None:
        """Tokens to reuse, or None to wait for a block that is being computed."""
        if request.scores_prompt:
            return 0  # cached tokens have no hidden states to score
        num_cached = self.kv.match_prefix(request)
        return None if self.kv.is_being_computed(request, num_cached) else num_cached

    def _admit(self, plan: StepPlan, request: Request, num_cached: int) -> bool:
        count = self._chunk_size(plan, request, num_cached)
        reserved = self._num_watermark_blocks if self._running else 0
        if not count or not self.kv.admit(request, num_cached, reserved):
            return False
        self._waiting.remove(request)
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached
        plan.add(request, count, self.kv.table_rows[request.request_id])
        return True

    def _chunk_size(self, plan: StepPlan, request: Request, start: int) -> int:
        """Tokens that a request gets beyond `start`; 0 if it has to wait for another step."""
        needed = request.num_tokens - start
        if not self.config.enable_chunked_prefill:
            return needed if needed <= plan.budget else 0
        count = min(needed, plan.budget)
        if self.config.long_prefill_token_threshold and len(self._requests) > 1:
            count = min(count, self.config.long_prefill_token_threshold)
        if request.scores_prompt:
            count = min(count, plan.scored_budget)
            plan.scored_budget -= count
        return count

    # --- preemption ---------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, request: Request) -> bool:
        """Gets a running request a block for one more token; False if it was preempted itself.

        Raises:
          InternalError: it is alone and there is still no room, which `add` rules out.
        """
        while request.status is RequestStatus.RUNNING:
            if self.kv.allocate(request, 1):
                return True
            if len(self._running) == 1:
                raise InternalError(
                    f"request {request.request_id} runs alone with {request.num_tokens} tokens and "
                    f"found no room in {self.kv.num_blocks} blocks of {self.kv.block_size}"
                )
            victim = self._choose_victim()
            plan.cancel(victim)
            self._preempt(victim)
        return False

    def _choose_victim(self) -> Request:
        """The newest running request; under the priority policy, the newest of the worst."""
        newest_first = reversed(self._running.values())
        if not self._by_priority:
            return next(newest_first)
        return max(newest_first, key=lambda request: (request.priority, request.times.arrival))

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        del self._running[request.request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    # --- update -------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> list[Request]:
        """Records what a step computed.

        Args:
          output: what `schedule` returned.
          sampled: for each row, the token it sampled, or None if it did not sample.

        Returns:
          The requests that ended with it: by an end-of-sequence or stop id, or by length. Rows
          whose request ended or was preempted since `schedule` are ignored.

        Raises:
          InternalError: a row had to sample and brought no token.
        """
        block_size, running = self.kv.block_size, RequestStatus.RUNNING
        finished = []
        for (request, start, count, samples, _), token in zip(output.rows, sampled, strict=True):
            if request.status is not running or request.num_computed_tokens != start:
                continue
            end = request.num_computed_tokens = start + count
            if end // block_size != start // block_size:
                self.kv.commit(request)
            if samples:
                if token is None:
                    raise InternalError(f"request {request.request_id} sampled no token")
                request.output_token_ids.append(token)
            at_limit = end + samples >= request.max_total_tokens
            if at_limit or token in request.stop_ids:
                stop = check_stop(request, token, at_limit)
                if stop is not None:
                    self.finish(request, *stop)
                    finished.append(request)
        return finished

    def check(self) -> None:
        """Recomputes every invariant of the queues and of the blocks from scratch.

        Raises:
          InternalError: one does not hold.
        """
        if len(self._running) > self.config.max_num_seqs:
            raise InternalError(f"{len(self._running)} requests run")
        check_queues(self._requests, self._running, self._waiting, self.kv)
