"""Preemption and deferral: who loses blocks, who waits for whom, and that everybody ends."""

import pytest

from leadframe.errors import InternalError
from leadframe.request import FinishReason, RequestStatus
from leadframe.scheduler import WaitingQueue
from leadframe.scheduler.scheduler import MAX_DEFERRED


def names(requests):
    return [request.request_id for request in requests]


@pytest.fixture
def make(policy):
    return policy.make_request


class TestPreemption:
    def test_case_15_two_that_cannot_both_finish_say_what_they_say_alone(self, policy, make):
        harness = policy.Harness(7, caching=False)  # 6 blocks of 4
        requests = [make([i] * 8, 12, temperature=1.0, seed=i) for i in range(2)]
        harness.add(*requests)
        harness.run()
        assert [r.output_token_ids for r in requests] == [policy.solo_tokens(r) for r in requests]
        assert [r.num_preemptions for r in requests] == [0, 1]

    @pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("caching", [True, False])
    def test_a_request_may_be_preempted_after_any_step(self, policy, make, every, caching):
        harness = policy.Harness(caching=caching, max_num_batched_tokens=8)
        request = harness.add(make(7, 20, temperature=1.0, seed=3))
        steps = 0
        while harness.scheduler.has_work:
            harness.step()
            steps += 1
            if steps % every == 0 and request.num_preemptions < 8 and not request.is_finished:
                harness.preempt()
        assert request.num_preemptions >= 3
        assert request.output_token_ids == policy.solo_tokens(request)

    def test_recomputing_covers_prompt_and_output_and_samples_only_at_the_end(self, policy, make):
        harness = policy.Harness(caching=False, max_num_batched_tokens=8)
        request = harness.add(make(7, 20))
        for _ in range(6):
            harness.step()
        assert request.num_tokens == 13
        harness.preempt()
        rows = [harness.step().rows[0] for _ in range(2)]
        assert [(row.start, row.num_tokens, row.samples) for row in rows] == [
            (0, 8, False),
            (8, 5, True),
        ]
        assert request.num_tokens == 14

    def test_the_newest_is_preempted_and_goes_to_the_front(self, policy, make):
        harness = policy.Harness(8, max_num_seqs=3, caching=False)  # 7 blocks of 4
        harness.add(*(make([i] * 8, 8, request_id=str(i)) for i in range(4)))
        harness.step()
        assert names(harness.scheduler.waiting) == ["3"]
        output = harness.step()  # "0" takes the last free block; "1" needs one more
        assert names(output.preempted) == ["2"]
        assert names(harness.scheduler.waiting) == ["2", "3"]
        assert output.preempted[0].status is RequestStatus.PREEMPTED
        harness.run()

    def test_nothing_is_admitted_in_a_step_that_preempted(self, policy, make):
        harness = policy.Harness(8, max_num_seqs=3, caching=False)
        harness.add(*(make([i] * 8, 8, request_id=str(i)) for i in range(3)))
        harness.step()
        harness.add(make([9], 1, request_id="small"))
        output = harness.step()
        assert output.preempted
        assert harness.kv.num_free_blocks > 0
        assert "small" not in names(row.request for row in output.rows)

    def test_a_preemption_from_outside_is_reported_and_lets_nobody_in(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], 9, request_id="old"), make([2], 9, request_id="young"))
        harness.step()
        victim = harness.scheduler.preempt_newest()
        output = harness.schedule()
        assert output.preempted == [victim]
        assert names(row.request for row in output.rows) == ["old"]
        output = harness.schedule()
        assert output.preempted == []
        assert names(row.request for row in output.rows) == ["old", "young"]

    def test_several_victims_keep_their_order(self, policy, make):
        harness = policy.Harness()
        harness.add(*(make([i] * 5, 9, request_id=str(i)) for i in range(4)))
        harness.step()
        for _ in range(3):
            harness.scheduler.preempt_newest()
        harness.scheduler.check()
        assert names(harness.scheduler.running) == ["0"]
        assert names(harness.scheduler.waiting) == ["1", "2", "3"]
        harness.run()

    def test_a_request_may_preempt_itself(self, policy, make):
        harness = policy.Harness(6, caching=False)  # 5 blocks of 4
        old, young = make([1] * 9, 5, request_id="old"), make([2] * 8, 5, request_id="young")
        harness.add(old, young)
        harness.step()
        output = harness.step()
        assert names(output.preempted) == ["young"]
        assert names(row.request for row in output.rows) == ["old"]
        harness.run()

    def test_by_priority_the_worst_is_preempted_and_its_row_is_taken_back(self, policy, make):
        harness = policy.Harness(7, caching=False, policy="priority")  # 6 blocks of 4
        worse = harness.add(make([1] * 9, 9, request_id="worse", priority=2))
        harness.step()
        better = harness.add(make([2] * 12, 5, request_id="better", priority=1))
        output = harness.step()
        assert names(row.request for row in output.rows) == ["worse", "better"]
        output = harness.step()  # "worse" comes first in order, then "better" needs its block
        assert names(output.preempted) == ["worse"]
        assert names(row.request for row in output.rows) == ["better"]
        assert output.num_tokens == 1
        harness.run()
        for request in (worse, better):
            assert request.output_token_ids == policy.solo_tokens(request)

    def test_by_priority_the_latest_arrival_among_equals_is_preempted(self, policy, make):
        harness = policy.Harness(policy="priority")
        for name, priority, arrival in [("a", 1, 5.0), ("b", 1, 7.0), ("c", 1, 6.0), ("d", 0, 9.0)]:
            request = make([1], 9, request_id=name, priority=priority)
            request.times.arrival = arrival
            harness.add(request)
        harness.step()
        assert [harness.scheduler.preempt_newest().request_id for _ in range(4)] == list("bcad")

    def test_counts_and_hits_are_of_the_first_admission(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make(9, 9))
        harness.step()
        harness.preempt()
        harness.step()
        assert request.num_computed_tokens > 0
        assert request.num_cached_tokens == 0
        assert harness.kv.prefix_queries == 9
        harness.run()

    def test_a_request_alone_that_finds_no_room_is_a_clear_internal_error(self, policy, make):
        harness = policy.Harness(4)  # 12 slots
        request = harness.add(make(10, 3, request_id="a"))
        request.max_total_tokens = 99  # what `add` would have refused
        with pytest.raises(InternalError, match=r"request a runs alone with 13 tokens.*3 blocks"):
            harness.run()

    def test_a_schedule_that_is_not_executed_changes_nothing_that_counts(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        request = harness.add(make(10, 9))
        while harness.scheduler.has_work:
            first, second = harness.schedule(), harness.schedule()
            assert first.rows == second.rows
            harness.step()
        assert request.output_token_ids == policy.solo_tokens(request)


class TestDeferral:
    """A request whose next block is being computed waits for it instead of computing it again."""

    def test_sixteen_with_one_prefix_compute_it_once(self, policy, make):
        harness = policy.Harness(400, max_num_seqs=16, max_num_batched_tokens=64)
        shared = [7] * 40
        requests = [make([*shared, i, i, i], 4) for i in range(16)]
        harness.add(*requests)
        harness.run()
        computed = sum(output.num_tokens for output in harness.outputs)
        assert computed == 43 + 15 * 3 + 16 * 3  # one prefix, the suffixes, the decodes
        assert [r.num_cached_tokens for r in requests] == [0] + [40] * 15
        for request in requests:
            assert request.output_token_ids == policy.solo_tokens(request)

    def test_it_starts_as_soon_as_its_own_part_is_there(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=9, long_prefill_token_threshold=8)
        harness.add(make([7] * 60, 1, request_id="long"), make([7] * 8 + [1], 1, request_id="b"))
        assert names(row.request for row in harness.step().rows) == ["long"]
        assert names(row.request for row in harness.step().rows) == ["b", "long"]

    def test_a_deferred_request_is_no_barrier(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=32)
        harness.add(
            make([7] * 9, request_id="first"),
            make([7] * 9, request_id="twin"),
            make([8] * 9, request_id="other"),
        )
        assert names(row.request for row in harness.step().rows) == ["first", "other"]
        assert names(row.request for row in harness.step().rows) == ["first", "other", "twin"]

    @pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
    def test_if_the_other_goes_away_it_computes_the_block_itself(self, policy, make, end):
        harness = policy.Harness(max_num_batched_tokens=8)
        first = harness.add(make([7] * 40, 2, request_id="first"))
        twin = harness.add(make([7] * 41, 2, request_id="twin"))
        harness.step()
        if end == "abort":
            harness.scheduler.abort("first")
        elif end == "preempt":
            harness.preempt()
        else:
            harness.scheduler.finish(first, FinishReason.ERROR)
        assert names(row.request for row in harness.step().rows) == [
            "first" if end == "preempt" else "twin"
        ]
        harness.run()
        assert twin.output_token_ids == policy.solo_tokens(twin)

    def test_whoever_is_waited_for_moves_in_every_step_that_could_admit(self, policy, make):
        """Budget left for admission means that every running request got tokens."""
        harness = policy.Harness(200, max_num_seqs=6, max_num_batched_tokens=12)
        harness.add(*(make([7] * 50 + [i], 3) for i in range(6)))
        while harness.scheduler.has_work:
            before = {r: r.num_computed_tokens for r in harness.scheduler.running}
            output = harness.step()
            if output.num_tokens < 12 and not output.preempted:
                served = {row.request for row in output.rows}
                assert set(before) <= served

    def test_one_step_passes_over_a_bounded_number(self, policy, make):
        seats = MAX_DEFERRED + 10
        harness = policy.Harness(400, max_num_seqs=seats, max_num_batched_tokens=64)
        harness.add(make([7] * 9, request_id="first"))
        harness.add(*(make([7] * 9) for _ in range(MAX_DEFERRED - 1)))
        harness.add(make([8] * 3, request_id="in sight"), make([7] * 9))
        harness.add(make([9] * 3, request_id="out of sight"))
        assert names(row.request for row in harness.step().rows) == ["first", "in sight"]
        assert "out of sight" in names(row.request for row in harness.step().rows)
        harness.run()

    def test_scoring_a_prompt_and_other_salts_do_not_wait(self, policy, make):
        harness = policy.Harness()
        harness.add(
            make([7] * 6, request_id="a"),
            make([7] * 6, request_id="scored", prompt_logprobs=0),
            make([7] * 6, request_id="salted", salt="x"),
        )
        assert len(harness.step().rows) == 3

    def test_without_a_prefix_cache_nobody_waits(self, policy, make):
        harness = policy.Harness(caching=False)
        harness.add(make([7] * 9), make([7] * 9))
        assert len(harness.step().rows) == 2


class TestWaitingQueue:
    def test_order_of_classes_and_within_them(self, make):
        queue = WaitingQueue(by_priority=True)
        a, b, c, d = (
            make([1], request_id=n, priority=p) for n, p in zip("abcd", [1, 0, 1, 0], strict=True)
        )
        for request in (a, b, c):
            queue.append(request)
        queue.appendleft(d)
        assert names(queue) == ["d", "b", "a", "c"]
        assert names(queue.first(3)) == ["d", "b", "a"]
        queue.remove(b)
        queue.remove(d)
        queue.remove(a)
        assert names(queue) == ["c"]
        queue.append(d)
        assert names(queue) == ["d", "c"]
        assert len(queue) == 2

    def test_classes_without_requests_are_not_kept(self, make):
        """Priorities are clients' numbers: a million of them must not stay behind."""
        queue = WaitingQueue(by_priority=True)
        for priority in range(100):
            request = make([1], priority=priority)
            queue.append(request)
            queue.remove(request)
        assert len(queue) == len(queue._classes) == len(queue._priorities) == 0

    def test_one_class_without_priorities(self, make):
        queue = WaitingQueue(by_priority=False)
        for name, priority in zip("ab", [2, 1], strict=True):
            queue.append(make([1], request_id=name, priority=priority))
        assert names(queue) == ["a", "b"]
