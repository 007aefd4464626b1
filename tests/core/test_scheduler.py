"""Scheduling rules: budget, order, admission, limits, stops, and ends in the wrong moment."""

import pytest

from leadframe.config import SchedulerConfig
from leadframe.errors import ConfigError, InternalError, PromptTooLong, QueueFull, RequestError
from leadframe.kv_cache import KVCacheManager
from leadframe.request import FinishReason, RequestStatus
from leadframe.scheduler import Scheduler
from leadframe.scheduler.scheduler import MAX_SCORED_TOKENS


def shape(output):
    """(id, start, tokens) of each row."""
    return [(row.request.request_id, row.start, row.num_tokens) for row in output.rows]


@pytest.fixture
def make(policy):
    return policy.make_request


class TestBudget:
    def test_a_prompt_is_split_over_steps_and_samples_in_the_last(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make(20, request_id="a"))
        outputs = [harness.step() for _ in range(4)]
        assert [shape(o) for o in outputs] == [
            [("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)], [("a", 20, 1)],
        ]  # fmt: skip
        assert [o.rows[0].samples for o in outputs] == [False, False, True, True]
        assert [o.num_decodes for o in outputs] == [0, 0, 0, 1]

    def test_case_29_every_step_carries_all_decodes(self, policy, make):
        harness = policy.Harness(900, max_num_batched_tokens=16, max_model_len=2100)
        streams = [make([i], 500, request_id=f"stream {i}") for i in range(4)]
        harness.add(*streams)
        harness.step()
        long = harness.add(make([1] * 2000, 2))
        while long.num_computed_tokens < 2000:
            output = harness.step()
            assert [row.request for row in output.rows[:4]] == streams
            assert output.num_tokens == 16 or long.num_computed_tokens == 2000

    def test_decodes_fit_even_if_an_older_prompt_could_take_the_whole_budget(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8, long_prefill_token_threshold=4)
        harness.add(make(40, request_id="old"), make([9], 9, request_id="young"))
        harness.step()
        assert shape(harness.step()) == [("young", 1, 1), ("old", 4, 4)]

    def test_a_request_that_gets_nothing_is_skipped_and_is_no_barrier(self, policy, make):
        harness = policy.Harness(
            max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False
        )
        harness.add(make([1], 9, request_id="decode"))
        harness.step()
        large, _ = harness.add(make([2] * 5, request_id="a"), make([3] * 3, request_id="b"))
        harness.schedule()  # never executed: both hold blocks and still need all their tokens
        large.output_token_ids += [4] * 5  # now it needs more than the decode leaves
        output = harness.scheduler.schedule()
        assert shape(output) == [("decode", 1, 1), ("b", 0, 3)]

    def test_the_rest_of_the_budget_goes_to_the_next_in_order(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=10)
        harness.add(*(make([i] * 6, request_id=str(i)) for i in range(3)))
        assert shape(harness.step()) == [("0", 0, 6), ("1", 0, 4)]
        assert shape(harness.step()) == [("0", 6, 1), ("1", 4, 2), ("2", 0, 6)]

    def test_only_the_uncached_suffix_counts(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=10)
        harness.add(make(9, 1))
        harness.run()
        harness.add(make(9, request_id="a"), make([5] * 9, request_id="b"))
        assert shape(harness.step()) == [("a", 8, 1), ("b", 0, 9)]

    def test_long_prompts_are_capped_only_in_company(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8)
        harness.add(make(40, request_id="a"))
        assert shape(harness.step()) == [("a", 0, 32)]
        harness.add(make([1] * 20, request_id="b"))
        assert shape(harness.step()) == [("a", 32, 8), ("b", 0, 8)]

    def test_no_step_scores_more_prompt_tokens_than_the_limit(self, policy, make):
        size = MAX_SCORED_TOKENS - 10
        harness = policy.Harness(300, max_num_batched_tokens=1000, max_model_len=600)
        harness.add(
            make([1] * size, 1, prompt_logprobs=0, request_id="a"),
            make([2] * size, 1, prompt_logprobs=0, request_id="b"),
        )
        assert shape(harness.step()) == [("a", 0, size), ("b", 0, 10)]
        harness.run()


class TestChunkingOff:
    def test_case_28_a_budget_below_the_longest_prompt_is_refused_at_start(self):
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=8, enable_chunked_prefill=False
        )
        kv = KVCacheManager(10, 4, enable_prefix_caching=True)
        with pytest.raises(ConfigError, match=r"8, less than the longest sequence, 12"):
            Scheduler(config, kv, max_model_len=12)
        Scheduler(config, kv, max_model_len=8)

    def test_a_prompt_that_does_not_fit_the_rest_ends_the_step(self, policy, make):
        harness = policy.Harness(
            max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False
        )
        harness.add(*(make([i] * n, 2, request_id=str(i)) for i, n in enumerate([10, 8, 3])))
        assert shape(harness.step()) == [("0", 0, 10)]
        assert shape(harness.step()) == [("0", 10, 1), ("1", 0, 8), ("2", 0, 3)]
        harness.run()


class TestAdmission:
    def test_max_num_seqs(self, policy, make):
        harness = policy.Harness(max_num_seqs=2)
        harness.add(*(make([i], 3, request_id=str(i)) for i in range(4)))
        assert shape(harness.step()) == [("0", 0, 1), ("1", 0, 1)]
        assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 2)
        harness.run()

    def test_the_whole_known_length_must_fit(self, policy, make):
        harness = policy.Harness(9, max_num_batched_tokens=8)  # 8 blocks of 4
        harness.add(make([1] * 20, request_id="a"), make([2] * 13, request_id="b"))
        harness.step()
        assert harness.kv.num_free_blocks == 3
        assert [r.request_id for r in harness.scheduler.waiting] == ["b"]
        harness.run()

    def test_the_first_that_does_not_fit_ends_admission(self, policy, make):
        harness = policy.Harness(9)
        harness.add(make([1] * 20, request_id="a"), make([2] * 13), make([3]))
        assert shape(harness.step()) == [("a", 0, 20)]

    def test_reuse_counts_when_room_is_measured(self, policy, make):
        harness = policy.Harness(9)
        harness.add(make([1] * 12, 1))
        harness.run()
        holder = harness.add(make([1] * 13, 9))
        harness.step()
        assert holder.num_cached_tokens == 12
        harness.add(make([1] * 12 + [2] * 8, 1, request_id="a"))
        assert ("a", 12, 8) in shape(harness.step())

    def test_watermark_blocks_stay_free_only_while_others_run(self, policy, make):
        harness = policy.Harness(11, watermark=0.25)  # 2 of 10 blocks
        harness.add(make([1] * 36, 1, request_id="alone"))
        assert shape(harness.step()) == [("alone", 0, 32)]
        harness.run()
        harness.kv.reset_prefix_cache()
        harness.add(make([1] * 8, 3, request_id="a"), make([2] * 28, 1, request_id="b"))
        assert shape(harness.step()) == [("a", 0, 8)]

    def test_prompt_logprobs_do_not_read_the_cache_and_still_fill_it(self, policy, make):
        harness = policy.Harness()
        first, second, third = (make(9, 1, prompt_logprobs=logprobs) for logprobs in (1, 1, None))
        for request in (first, second, third):
            harness.add(request)
            harness.run()
        assert [r.num_cached_tokens for r in (first, second, third)] == [0, 0, 8]

    def test_case_4_a_prompt_sent_twice_computes_its_last_block_again(self, policy, make):
        harness = policy.Harness(block_size=4)
        first = harness.add(make(8))
        harness.run()
        second = harness.add(make(8, request_id="again"))
        assert shape(harness.step()) == [("again", 4, 4)]
        harness.run()
        assert second.num_cached_tokens == 4
        assert first.output_token_ids == second.output_token_ids

    def test_priority_orders_waiting_requests_and_arrival_breaks_ties(self, policy, make):
        harness = policy.Harness(max_num_seqs=1, policy="priority")
        for name, priority in [("a", 2), ("b", 1), ("c", 2), ("d", 0), ("e", 1)]:
            harness.add(make([1], 1, request_id=name, priority=priority))
        order = [harness.step().rows[0].request.request_id for _ in range(5)]
        assert order == ["d", "b", "e", "a", "c"]

    def test_fcfs_ignores_priority(self, policy, make):
        harness = policy.Harness(max_num_seqs=1)
        harness.add(make([1], 1, request_id="a", priority=5), make([1], 1, priority=-5))
        assert harness.step().rows[0].request.request_id == "a"


class TestRefusals:
    def test_case_6_a_request_that_could_never_fit_is_refused_and_blocks_nobody(self, policy, make):
        harness = policy.Harness(9, max_model_len=64)  # 8 blocks of 4 = 32 slots
        with pytest.raises(PromptTooLong, match=r"40 tokens.*11 KV blocks of 4.*has 8"):
            harness.add(make([1] * 40, 4))
        small = harness.add(make(4))
        harness.run()
        assert small.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(("num_prompt", "max_tokens"), [(32, 1), (31, 2), (1, 32), (32, 0)])
    def test_a_request_that_just_fits_the_pool_runs_to_its_end(
        self, policy, make, num_prompt, max_tokens
    ):
        harness = policy.Harness(9, max_model_len=64)
        request = harness.add(make([1] * num_prompt, max_tokens))
        harness.run()
        assert len(request.output_token_ids) == max_tokens
        assert request.num_preemptions == 0

    @pytest.mark.parametrize(("num_prompt", "max_tokens"), [(32, 2), (1, 33), (33, 0)])
    def test_one_token_more_is_refused(self, policy, make, num_prompt, max_tokens):
        harness = policy.Harness(9, max_model_len=64)
        with pytest.raises(PromptTooLong, match="9 KV blocks"):
            harness.add(make([1] * num_prompt, max_tokens))
        assert not harness.scheduler.has_work

    def test_max_model_len(self, policy, make):
        harness = policy.Harness(max_model_len=20)
        with pytest.raises(PromptTooLong, match=r"15 tokens, 21 with the output.*holds 20"):
            harness.add(make(15, 6))
        harness.add(make(15, 5))

    def test_case_3_an_empty_prompt(self, policy, make):
        with pytest.raises(RequestError, match="empty") as caught:
            policy.Harness().add(make([]))
        assert caught.value.param == "prompt"

    def test_queue_full(self, policy, make):
        harness = policy.Harness(max_num_seqs=1, max_num_queued_reqs=2)
        harness.add(make([1], 9))
        harness.step()
        harness.add(make([2]), make([3]))
        with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
            harness.add(make([4]))
        assert caught.value.status == 503
        harness.run()
        harness.add(make([4]))

    def test_an_id_in_use(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], request_id="a"))
        with pytest.raises(RequestError, match="'a' is in use"):
            harness.add(make([2], request_id="a"))
        harness.run()
        harness.add(make([2], request_id="a"))


class TestStops:
    def finish(self, policy, make, tokens, **kwargs):
        """Runs a request that is made to say `tokens`."""
        harness = policy.Harness()
        request = harness.add(make([1], **kwargs))
        for token in tokens:
            assert not request.is_finished
            finished = harness.update(harness.schedule(), [token])
        assert finished == ([request] if request.is_finished else [])
        return request

    def test_a_named_stop_id_is_the_stop_reason(self, policy, make):
        request = self.finish(policy, make, [5, 6], stop_ids=(6,))
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 6)
        assert request.output_token_ids == [5, 6]

    def test_end_of_sequence_has_no_stop_reason(self, policy, make):
        harness = policy.Harness()
        request = make([1])
        request.stop_ids = frozenset([2])
        harness.add(request)
        harness.update(harness.schedule(), [2])
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)

    def test_length(self, policy, make):
        request = self.finish(policy, make, [5, 6, 7], max_tokens=3)
        assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)

    def test_a_stop_id_as_the_last_token_is_a_stop(self, policy, make):
        request = self.finish(policy, make, [5, 6], max_tokens=2, stop_ids=(6,))
        assert request.finish_reason is FinishReason.STOP

    def test_min_tokens_holds_stop_ids_back(self, policy, make):
        request = self.finish(policy, make, [6, 6], stop_ids=(6,), min_tokens=3, max_tokens=9)
        assert not request.is_finished
        request = self.finish(policy, make, [6, 6, 6], stop_ids=(6,), min_tokens=3, max_tokens=9)
        assert request.finish_reason is FinishReason.STOP

    def test_min_tokens_do_not_hold_length_back(self, policy, make):
        request = self.finish(policy, make, [6, 6], stop_ids=(6,), min_tokens=2, max_tokens=2)
        assert request.finish_reason is FinishReason.STOP
        request = self.finish(policy, make, [6], stop_ids=(6,), min_tokens=1, max_tokens=1)
        assert request.finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("num_prompt", [1, 8, 16, 17, 40])
    def test_max_tokens_0_ends_when_the_prompt_is_computed(self, policy, make, num_prompt):
        harness = policy.Harness(max_num_batched_tokens=16)
        request = harness.add(make(num_prompt, 0, prompt_logprobs=1))
        steps = harness.run()
        assert steps == -(-num_prompt // 16)
        assert not any(row.samples for output in harness.outputs for row in output.rows)
        assert request.finish_reason is FinishReason.LENGTH
        assert request.output_token_ids == []

    def test_a_row_that_samples_must_bring_a_token(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], request_id="a"))
        with pytest.raises(InternalError, match="request a sampled no token"):
            harness.scheduler.update(harness.schedule(), [None])


class TestEndsInTheWrongMoment:
    """Case 17: an abort is idempotent, frees everything, and races give one final state."""

    def test_while_waiting(self, policy, make):
        harness = policy.Harness(max_num_seqs=1)
        harness.add(make([1], 3))
        waiting = harness.add(make([2], 3, request_id="waiting"))
        harness.step()
        assert harness.scheduler.abort("waiting") is waiting
        assert waiting.finish_reason is FinishReason.ABORT
        harness.run()
        assert waiting.output_token_ids == []

    def test_between_two_chunks(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        request = harness.add(make(20, request_id="a"))
        harness.step()
        harness.scheduler.abort("a")
        harness.scheduler.check()
        assert harness.kv.num_free_blocks == harness.kv.num_blocks
        assert not harness.scheduler.has_work
        assert request.output_token_ids == []

    def test_in_the_step_in_which_it_would_finish(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make(5, 1, request_id="a"))
        output = harness.schedule()
        harness.scheduler.abort("a")
        assert harness.update(output, [7]) == []
        assert request.finish_reason is FinishReason.ABORT
        assert request.output_token_ids == []
        assert harness.kv.match_prefix(make(5)) == 0, "what was not computed was published"

    def test_twice_after_the_end_and_unknown(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make(5, 1, request_id="a"))
        harness.run()
        assert harness.scheduler.abort("a") is None
        assert harness.scheduler.abort("never heard of") is None
        harness.scheduler.finish(request, FinishReason.ERROR)
        assert request.finish_reason is FinishReason.LENGTH

    def test_while_preempted(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make(5, 9, request_id="a"))
        harness.step()
        assert harness.scheduler.preempt_newest() is request
        assert request.status is RequestStatus.PREEMPTED
        harness.scheduler.abort("a")
        harness.scheduler.check()
        assert not harness.scheduler.has_work
        assert harness.scheduler.preempt_newest() is None

    def test_an_id_may_be_used_again_while_its_old_step_is_under_way(self, policy, make):
        harness = policy.Harness()
        harness.add(make(5, request_id="a"))
        output = harness.schedule()
        sampled = harness.execute(output)
        harness.scheduler.abort("a")
        again = harness.add(make(5, request_id="a"))
        assert harness.update(output, sampled) == []
        assert again.num_computed_tokens == 0
        harness.run()
        assert again.output_token_ids == policy.solo_tokens(again)

    def test_an_output_that_was_overtaken_is_ignored(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        request = harness.add(make(12))
        dropped = harness.schedule()
        harness.step()
        assert request.num_computed_tokens == 8
        assert harness.update(dropped, [None]) == []
        assert request.num_computed_tokens == 8
        decode = [harness.step(), harness.schedule()][1]
        harness.update(decode, [1])
        harness.update(decode, [1])
        assert request.num_tokens == 14

    def test_a_stop_string_ends_a_request_between_steps(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make(5, 9))
        harness.step()
        harness.scheduler.finish(request, FinishReason.STOP, "END")
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")
        harness.run()

    def test_a_failed_request_leaves_nothing_to_be_found(self, policy, make):
        harness = policy.Harness(block_size=4)
        request = harness.add(make(9, 9))
        harness.step()
        blocks = harness.kv.block_ids(request).tolist()
        output = harness.schedule()
        harness.scheduler.finish(request, FinishReason.ERROR)
        assert harness.scheduler.take_discarded_blocks() == blocks
        assert harness.scheduler.take_discarded_blocks() == []
        harness.update(output, [None])
        assert harness.kv.match_prefix(make(9)) == 0
        assert request.finish_reason is FinishReason.ERROR

    def test_case_18_an_aborted_requests_prefix_stays_in_the_cache(self, policy, make):
        harness = policy.Harness(block_size=4)
        harness.add(make(9, 9, request_id="a"))
        harness.step()
        harness.scheduler.abort("a")
        assert harness.kv.num_free_blocks == harness.kv.num_blocks
        assert harness.kv.match_prefix(make(9)) == 8
