"""The KV cache manager: block tables, prefix hits, what is published and what is thrown away."""

import hashlib

import numpy as np
import pytest

from leadframe.errors import InternalError
from leadframe.kv_cache import KVCacheManager, block_hash

BLOCK = 4


@pytest.fixture
def kv():
    return KVCacheManager(num_blocks=11, block_size=BLOCK, enable_prefix_caching=True)


@pytest.fixture
def make(policy):
    return policy.make_request


def admit(kv, request, reserved=0):
    """Admits a request as the scheduler does; returns the tokens it reused, None if no room."""
    cached = kv.match_prefix(request)
    if not kv.admit(request, cached, reserved):
        return None
    request.num_computed_tokens = cached
    return cached


def compute(kv, request, num_tokens=None):
    """Marks tokens as computed: all but the last known one unless told otherwise."""
    known = request.num_tokens if num_tokens is None else request.num_computed_tokens + num_tokens
    request.num_computed_tokens = known
    kv.commit(request)
    kv.check()


def finished(kv, request):
    """Admits, computes and frees a request; what it published stays findable."""
    admit(kv, request)
    compute(kv, request)
    kv.free(request)
    return request


class TestTables:
    def test_a_table_covers_every_known_token_at_admission(self, kv, make):
        request = make(9)
        assert admit(kv, request) == 0
        np.testing.assert_array_equal(kv.block_ids(request), [1, 2, 3])
        np.testing.assert_array_equal(
            kv.block_tables[kv.table_rows[request.request_id]][:4], [1, 2, 3, 0]
        )
        assert kv.num_free_blocks == 7
        assert kv.usage == pytest.approx(0.3)

    def test_allocation_happens_at_block_edges_only(self, kv, make):
        request = make(8)
        admit(kv, request)
        compute(kv, request)
        for position in range(8, 14):
            request.output_token_ids.append(1)
            assert kv.allocate(request, 1)
            assert len(kv.block_ids(request)) == position // BLOCK + 1
            compute(kv, request)

    def test_tables_are_append_only(self, kv, make):
        request = make(4)
        admit(kv, request)
        before = kv.block_ids(request).tolist()
        request.num_computed_tokens = 4
        kv.commit(request)
        kv.allocate(request, 9)
        assert kv.block_ids(request).tolist()[:1] == before
        assert len(kv.block_ids(request)) == 4

    def test_no_room_changes_nothing(self, kv, make):
        first, second = make(30), make([9] * 12)
        admit(kv, first)
        assert kv.num_free_blocks == 2
        assert admit(kv, second) is None
        first.num_computed_tokens = 30
        kv.commit(first)
        assert not kv.allocate(first, 11)
        assert kv.num_free_blocks == 2
        assert len(kv.block_ids(first)) == 8
        assert len(kv.block_ids(second)) == 0
        kv.check()

    def test_reserved_blocks_stay_free(self, kv, make):
        assert admit(kv, make(20), reserved=6) is None
        assert admit(kv, make(20), reserved=5) == 0

    def test_tables_grow_in_both_directions(self, make):
        kv = KVCacheManager(2000, 1, enable_prefix_caching=False)
        requests = [make([i] * (20 + i)) for i in range(40)]
        for request in requests:
            admit(kv, request)
        assert set(kv.table_rows.values()) == set(range(40)), "rows are below the requests at once"
        for request in requests:
            table = kv.block_ids(request)
            assert len(table) == request.num_tokens
            row = kv.block_tables[kv.table_rows[request.request_id]]
            np.testing.assert_array_equal(row[: len(table)], table)
            assert not row[len(table) :].any()
        kv.check()

    def test_freeing_twice_or_without_blocks_is_harmless(self, kv, make):
        request = make(5)
        kv.free(request)
        admit(kv, request)
        kv.free(request)
        kv.free(request)
        assert kv.num_free_blocks == kv.num_blocks == 10
        assert kv.block_ids(request).size == 0
        kv.check()


class TestPrefixHits:
    @pytest.mark.parametrize(
        ("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
    )
    def test_case_4_a_full_hit_leaves_the_last_token_to_compute(self, kv, make, num_tokens, hit):
        finished(kv, make(16))
        assert kv.match_prefix(make(num_tokens)) == hit

    def test_a_hit_shares_the_blocks_themselves(self, kv, make):
        first = make(9)
        admit(kv, first)
        compute(kv, first)
        second = make(9)
        assert admit(kv, second) == 8
        np.testing.assert_array_equal(kv.block_ids(first)[:2], kv.block_ids(second)[:2])
        assert kv.block_ids(first)[2] != kv.block_ids(second)[2]
        assert kv.num_free_blocks == 6
        kv.check()

    def test_a_free_block_is_revived(self, kv, make):
        finished(kv, make(8))
        assert kv.num_free_blocks == 10
        second = make(9)
        assert admit(kv, second) == 8
        assert kv.num_free_blocks == 7
        kv.check()

    def test_revived_blocks_need_room_too(self, kv, make):
        """A hit on free blocks takes them from the free queue: it is not free of charge."""
        finished(kv, make(16))
        admit(kv, make([8] * 25))
        assert kv.num_free_blocks == 3
        request = make(16)
        assert kv.match_prefix(request) == 12
        assert admit(kv, request) is None
        assert kv.num_free_blocks == 3
        kv.check()

    def test_nothing_is_found_before_it_is_computed(self, kv, make):
        first = make(12)
        admit(kv, first)
        assert kv.match_prefix(make(13)) == 0
        compute(kv, first, 7)
        assert kv.match_prefix(make(13)) == 4
        compute(kv, first, 1)
        assert kv.match_prefix(make(13)) == 8

    def test_output_tokens_are_found_as_a_prefix(self, kv, make):
        first = make(6)
        admit(kv, first)
        compute(kv, first)
        first.output_token_ids += [41, 42, 43]
        kv.allocate(first, 3)
        first.num_computed_tokens = 8
        kv.commit(first)
        kv.free(first)
        assert kv.match_prefix(make([0, 1, 2, 3, 4, 5, 41, 42, 43])) == 8

    def test_a_different_token_ends_the_hit(self, kv, make):
        finished(kv, make(12))
        assert kv.match_prefix(make([0, 1, 2, 3, 4, 9, 6, 7, 8, 9, 10, 11, 12])) == 4

    def test_the_same_tokens_after_another_prefix_are_no_hit(self, kv, make):
        finished(kv, make([5, 5, 5, 5, 1, 2, 3, 4]))
        assert kv.match_prefix(make([1, 2, 3, 4, 1, 2, 3, 4, 0])) == 0

    def test_case_41_the_cache_salt_separates_whole_chains(self, kv, make):
        finished(kv, make(12, salt="a"))
        assert kv.match_prefix(make(12, salt="a")) == 8
        assert kv.match_prefix(make(12, salt="b")) == 0
        assert kv.match_prefix(make(12)) == 0

    def test_caching_off(self, make):
        kv = KVCacheManager(11, BLOCK, enable_prefix_caching=False)
        finished(kv, make(12))
        assert kv.match_prefix(make(12)) == 0
        assert admit(kv, make(12)) == 0
        assert not kv.is_being_computed(make(12), 0)

    def test_tails_are_evicted_before_heads(self, kv, make):
        finished(kv, make(16))
        admit(kv, make([9] * 28))  # takes 7 of 10 blocks: 6 never used, 1 cached
        assert kv.match_prefix(make(17)) == 12

    def test_the_least_recently_used_prefix_is_evicted_first(self, kv, make):
        finished(kv, make([1] * 8))
        finished(kv, make([2] * 8))
        finished(kv, make([1] * 9))  # used again
        admit(kv, make([9] * 32))  # 8 of 10 blocks
        assert kv.match_prefix(make([2] * 9)) == 0
        assert kv.match_prefix(make([1] * 9)) == 8

    def test_counters_count_first_admissions_in_tokens(self, kv, make):
        finished(kv, make(10))
        request = make(10)
        admit(kv, request)
        assert (kv.prefix_queries, kv.prefix_hits) == (20, 8)
        kv.free(request)
        request.num_computed_tokens, request.num_preemptions = 0, 1
        admit(kv, request)
        assert (kv.prefix_queries, kv.prefix_hits) == (20, 8)

    def test_case_42_a_reset_forgets_everything_even_what_is_being_computed(self, kv, make):
        finished(kv, make([1] * 8))
        running = make([2] * 12)
        admit(kv, running)
        compute(kv, running, 4)
        kv.reset_prefix_cache()
        compute(kv, running, 4)
        kv.check()
        assert kv.match_prefix(make([1] * 9)) == 0
        assert kv.match_prefix(make([2] * 12)) == 0
        kv.free(running)
        # The first block is computed anew; the second, of the old weights, must not follow it.
        finished(kv, make([2] * 4))
        assert kv.match_prefix(make([2] * 12)) == 4
        finished(kv, make([2] * 12))
        assert kv.match_prefix(make([2] * 12)) == 8


class TestBeingComputed:
    def test_a_block_is_being_computed_from_admission_to_commit(self, kv, make):
        first, second = make(12), make(12)
        assert not kv.is_being_computed(second, 0)
        admit(kv, first)
        assert kv.is_being_computed(second, 0)
        compute(kv, first, 4)
        assert kv.match_prefix(second) == 4
        assert kv.is_being_computed(second, 4)
        compute(kv, first, 4)
        assert kv.match_prefix(second) == 8
        # Block 2 is being computed, but it holds the last token of `second`.
        assert not kv.is_being_computed(second, 8)

    @pytest.mark.parametrize("discard", [False, True])
    def test_it_ends_when_the_request_goes_away(self, kv, make, discard):
        first, second = make(12), make(12)
        admit(kv, first)
        kv.free(first, discard=discard)
        assert not kv.is_being_computed(second, 0)
        kv.check()

    def test_another_prefix_or_salt_does_not_wait(self, kv, make):
        admit(kv, make(12))
        assert not kv.is_being_computed(make(12, salt="x"), 0)
        assert not kv.is_being_computed(make([1] * 12), 0)
        assert not kv.is_being_computed(make(4), 0)

    def test_two_may_compute_the_same(self, kv, make):
        first, second, third = make(12), make(12), make(12)
        assert kv.admit(first, 0)
        assert kv.admit(second, 0)
        kv.free(first)
        assert kv.is_being_computed(third, 0)
        kv.free(second)
        assert not kv.is_being_computed(third, 0)

    def test_nobody_waits_for_output(self, kv, make):
        """What a request will say is unknown, so only blocks known at admission are announced."""
        first = make(4)
        admit(kv, first)
        compute(kv, first)
        first.output_token_ids += [1, 2, 3, 4]
        kv.allocate(first, 4)
        assert not kv.is_being_computed(make([0, 1, 2, 3, 1, 2, 3, 4, 5]), 4)
        kv.check()


class TestDiscard:
    def test_a_failed_requests_blocks_are_not_found_and_must_be_scrubbed(self, kv, make):
        request = make(10)
        admit(kv, request)
        compute(kv, request)
        assert kv.free(request, discard=True) == [1, 2, 3]
        assert kv.match_prefix(make(10)) == 0
        kv.check()

    def test_shared_blocks_are_forgotten_and_left_to_their_other_holder(self, kv, make):
        first, second = make(10), make(10)
        for request in (first, second):
            admit(kv, request)
            compute(kv, request)
        assert kv.block_ids(second).tolist() == [1, 2, 4]
        assert kv.free(first, discard=True) == [3]
        assert kv.match_prefix(make(10)) == 0
        assert kv.free(second, discard=True) == [1, 2, 4]
        kv.check()

    def test_an_ordinary_end_scrubs_nothing(self, kv, make):
        request = make(10)
        admit(kv, request)
        assert kv.free(request) == []


class TestHashing:
    def test_the_chain_is_as_documented(self, kv, make):
        request = make(8, salt="s")
        root = hashlib.sha256(b"leadframe prefix cache v1").digest()
        data = np.arange(8, dtype="<i4").tobytes()
        first = hashlib.sha256(root + data[:16] + b"salt:s").digest()
        second = hashlib.sha256(first + data[16:]).digest()
        hashes = []
        block_hash.extend_hashes(hashes, request, 2, BLOCK)
        assert hashes == [first, second]

    def test_a_block_is_hashed_once_in_the_life_of_a_request(self, kv, make, monkeypatch):
        hashed = []
        original = block_hash.extra_keys

        def counting(request, index):
            hashed.append(index)
            return original(request, index)

        monkeypatch.setattr(block_hash, "extra_keys", counting)
        request = make(10)
        for _ in range(3):
            kv.match_prefix(request)
            kv.is_being_computed(request, 0)
        admit(kv, request)
        request.num_computed_tokens = 10
        kv.commit(request)
        for token in range(6):
            request.output_token_ids.append(token)
            kv.allocate(request, 1)
            request.num_computed_tokens += 1
            kv.commit(request)
        assert hashed == [0, 1, 2, 3]


class TestErrors:
    def test_admission_with_a_prefix_that_is_gone(self, kv, make):
        finished(kv, make(12))
        request = make(12)
        cached = kv.match_prefix(request)
        kv.reset_prefix_cache()
        with pytest.raises(InternalError, match="gone"):
            kv.admit(request, cached)

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            (lambda kv, r: kv._tables.ids.__setitem__((0, 5), 3), "past its end"),
            (lambda kv, r: kv._tables.ids.__setitem__((0, 1), 1), "ref count|twice"),
            (lambda kv, r: setattr(r, "num_computed_tokens", 13), "computed more tokens"),
            (lambda kv, r: setattr(r, "num_computed_tokens", 5), "not committed"),
            (lambda kv, r: r.prompt_token_ids.__setitem__(0, 9), "hashes"),
            (lambda kv, r: kv._computing.update([b"x"]), "being computed"),
            (lambda kv, r: kv._computing.clear(), "being computed"),
            (lambda kv, r: kv._pool.acquire(1), "ref count"),
        ],
    )
    def test_check_finds_each_kind_of_damage(self, kv, make, harm, message):
        request = make(10)
        admit(kv, request)
        kv.check()
        harm(kv, request)
        with pytest.raises(InternalError, match=message):
            kv.check()

    def test_check_finds_a_shared_row(self, kv, make):
        first, second = make(3), make([9] * 3)
        admit(kv, first)
        admit(kv, second)
        kv.table_rows[second.request_id] = kv.table_rows[first.request_id]
        with pytest.raises(InternalError):
            kv.check()
