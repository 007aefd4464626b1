"""Packing: every array of a batch, its padding, and the way back from its rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.errors import InternalError
from leadframe.platform.batch import Bucket, packed_sizes, unpack
from leadframe.platform.capabilities import Capabilities
from leadframe.runner import sampling_rows

RECORD = Capabilities("torch", graph="record")
STATIC = Capabilities("jax", graph="compile", static_shapes=True)


@pytest.fixture
def make(policy):
    return policy.make_request


def arrays_of(built):
    return unpack(built.batch.bucket, built.batch.ints, built.batch.floats)


def build(harness):
    output = harness.schedule()
    built = harness.builder.build(output)
    assert (built.batch.ints.dtype, built.batch.floats.dtype) == (np.int32, np.float32)
    sizes = (len(built.batch.ints), len(built.batch.floats))
    assert sizes == packed_sizes(built.batch.bucket)
    return output, built, arrays_of(built)


def mixed(policy, make, **kwargs):
    """A harness whose next step has a decode at position 5 and a chunk of tokens [4, 10)."""
    harness = policy.Harness(max_num_batched_tokens=9, long_prefill_token_threshold=6, **kwargs)
    harness.add(make([30, 31, 32, 33, 34], 9))
    harness.step()
    harness.add(make(range(10, 24), 9))
    output = harness.schedule()
    assert [row.num_tokens for row in output.rows] == [1, 6]
    harness.update(output, [47, None])
    return harness


class TestLayout:
    def test_a_mixed_step_of_exact_size(self, policy, make):
        _, built, a = build(mixed(policy, make))
        assert built.batch.bucket == Bucket(7, 2, 1, 3, 2)
        assert a.query_start.tolist() == [0, 1, 7]
        assert a.seq_lens.tolist() == [7, 12]
        # The whole prompt has 4 blocks; this step reaches 3 of them.
        assert a.block_table.tolist() == [[1, 2, 0], [3, 4, 5]]
        assert a.positions.tolist() == [6, *range(6, 12)]
        assert a.slots.tolist() == [2 * 4 + 2, 18, 19, 20, 21, 22, 23]
        assert a.token_ids.tolist() == [47, *range(16, 22)]
        assert a.logits_idx.tolist() == [0, 6]
        assert (built.batch.live_tokens, built.batch.live_seqs) == (7, 2)
        assert built.batch.max_seq_len == 12

    def test_blocks_that_a_chunk_does_not_reach_stay_null(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=10)
        harness.add(make(3, 9), make([9] * 20, 9))
        _, built, a = build(harness)
        assert len(harness.kv.block_ids(harness.scheduler.running[1])) == 5
        assert a.block_table.tolist() == [[1, 0], [2, 3]]
        assert built.batch.bucket.num_blocks == 2

    def test_padded_decodes(self, policy, make):
        harness = policy.Harness(caps=RECORD)
        harness.add(*(make([i] * 5, 9) for i in range(3)))
        harness.step()
        _, built, a = build(harness)
        assert built.batch.bucket == Bucket(4, 4, 4, 16, 4)
        assert a.query_start.tolist() == [0, 1, 2, 3, 4]
        assert a.seq_lens.tolist() == [6, 6, 6, 0]
        assert a.block_table[:, :3].tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 0], [0, 0, 0]]
        assert not a.block_table[:, 3:].any()
        assert a.slots.tolist() == [9, 17, 25, 0]
        assert a.positions.tolist() == [5, 5, 5, 0]
        assert a.token_ids[3] == 0
        assert a.logits_idx.tolist() == [0, 1, 2, 3]
        assert built.batch.live_seqs == built.batch.live_tokens == 3

    def test_a_padded_mixed_step_has_chunk_rows_only(self, policy, make):
        _, built, a = build(mixed(policy, make, caps=STATIC))
        assert built.batch.bucket == Bucket(9, 8, 0, 16, 8)
        assert a.query_start.tolist() == [0, 1, 7, 7, 7, 7, 7, 7, 7]
        assert a.seq_lens.tolist() == [7, 12, 0, 0, 0, 0, 0, 0]
        assert a.slots.tolist() == [10, 18, 19, 20, 21, 22, 23, 0, 0]
        assert a.token_ids.tolist() == [47, *range(16, 22), 0, 0]
        assert a.logits_idx.tolist() == [0, 6, 0, 0, 0, 0, 0, 0]

    def test_a_table_wider_than_the_matrix_and_a_matrix_wider_than_the_table(self, policy, make):
        harness = policy.Harness(2000, 1, max_model_len=2000, max_num_batched_tokens=2000)
        short = harness.add(make([1], 9))
        harness.step()
        _, _, a = build(harness)
        assert a.block_table.tolist() == [[1, 2]]
        harness.add(make([2] * 1000, 1))
        harness.step()
        assert harness.kv.block_tables.shape[1] >= 1000
        _, _, a = build(harness)
        assert a.block_table.tolist() == [harness.kv.block_ids(short).tolist()]

    def test_a_bucket_that_would_move_the_chunks_is_refused(self, policy, make):
        class Moving:
            def bucket_for(self, needed):
                return Bucket(9, 4, 3, 16, 4)

        harness = mixed(policy, make)
        harness.builder._policy = Moving()
        with pytest.raises(InternalError, match="pads decodes before chunks"):
            build(harness)

    def test_buffers_are_fresh_in_every_step(self, policy, make):
        """A backend may still be reading the last ones."""
        harness = policy.Harness()
        harness.add(make(3, 9))
        _, first, _ = build(harness)
        before = first.batch.ints.copy()
        harness.step()
        _, second, _ = build(harness)
        assert not np.shares_memory(first.batch.ints, second.batch.ints)
        np.testing.assert_array_equal(first.batch.ints, before)


class TestSampling:
    @pytest.mark.parametrize(
        ("kinds", "variant"),
        [
            ([{}], "greedy"),
            ([{"temperature": 1.0}], "plain"),
            ([{"temperature": 1.0, "min_p": 0.1}, {}], "plain"),
            ([{"temperature": 1.0, "top_k": 5}, {"temperature": 1.0}], "threshold"),
            ([{"temperature": 1.0, "top_k": -1}], "plain"),
            ([{}, {"temperature": 1.0, "top_p": 0.9}], "threshold"),
            ([{"top_p": 0.9, "top_k": 3}], "greedy"),
        ],
    )
    def test_variants(self, policy, make, kinds, variant):
        harness = policy.Harness()
        harness.add(*[make([i], 9, **kind) for i, kind in enumerate(kinds)], make([9] * 30, 9))
        _, built, _ = build(harness)
        assert built.batch.bucket.sample == variant

    def test_a_request_that_needs_the_sort_takes_the_step_with_it(self, policy, make):
        harness = policy.Harness()
        _, second = harness.add(*(make([i], 9, temperature=1.0, top_k=3) for i in range(2)))
        output, built, _ = build(harness)
        assert built.batch.bucket.sample == "threshold"
        second.needs_sort = True
        again = harness.builder.build(output)
        assert again.batch.bucket.sample == "sort"
        np.testing.assert_array_equal(built.batch.ints, again.batch.ints)
        np.testing.assert_array_equal(built.batch.floats, again.batch.floats)

    def test_a_step_that_samples_nothing_computes_no_logits(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make(20, 9, temperature=1.0))
        _, built, a = build(harness)
        assert built.batch.bucket == Bucket(8, 1, 0, 2, 0, "skip")
        assert a.logits_idx.size == 0

    def test_rows_that_do_not_sample_choose_nothing(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make([1], 9), make(20, 9, temperature=1.0, top_k=3, logprobs=5))
        _, built, _ = build(harness)
        assert (built.batch.bucket.sample, built.batch.bucket.num_logprobs) == ("greedy", None)

    @pytest.mark.parametrize("caps", [RECORD, STATIC])
    def test_settings_and_draws_of_every_row_and_neutral_padding(self, policy, make, caps):
        harness = policy.Harness(caps=caps)
        harness.add(
            make([1], 9, temperature=0.5, top_p=0.8, top_k=7, min_p=0.25, seed=-3),
            make([2], 9, temperature=1e-6, top_p=0.5, top_k=9, min_p=0.5),
            make([3], 9, temperature=1.5, seed=2**62),
        )
        for position in range(4):
            _, built, a = build(harness)
            assert built.batch.bucket.sample == "threshold"
            np.testing.assert_array_equal(a.temperature, np.float32([0.5, 0, 1.5, 0]))
            np.testing.assert_array_equal(a.top_p, np.float32([0.8, 1, 1, 1]))
            np.testing.assert_array_equal(a.top_k, [7, 0, 0, 0])
            np.testing.assert_array_equal(a.min_p, np.float32([0.25, 0, 0, 0]))
            draws = [policy.uniform(-3, position), 0, policy.uniform(2**62, position), 0]
            np.testing.assert_array_equal(a.uniform, np.float32(draws))
            harness.step()

    def test_draws_go_on_over_the_window(self, policy, make):
        harness = policy.Harness(200, max_model_len=500)
        request = harness.add(make([1], 400, temperature=1.0, seed=5))
        for position in range(300):
            if position == 200:
                harness.preempt()
            harness.step()
        assert request.output_token_ids == policy.solo_tokens(request)[:300]

    def test_a_window_is_drawn_once(self, policy, make, monkeypatch):
        drawn = []
        original = sampling_rows.uniform_windows

        def counting(seeds, windows):
            drawn.extend(windows.tolist())
            return original(seeds, windows)

        monkeypatch.setattr(sampling_rows, "uniform_windows", counting)
        harness = policy.Harness(200, max_model_len=500)
        harness.add(make([1], 300, temperature=1.0))
        harness.run()
        assert drawn == [0, 1, 2]

    def test_a_row_of_the_tables_that_changes_hands_changes_settings(self, policy, make):
        harness = policy.Harness(max_num_seqs=1)
        harness.add(make([1], 1, temperature=1.0, seed=1), make([2], 2, temperature=0.25, seed=2))
        harness.step()
        _, _, a = build(harness)
        assert a.temperature.tolist() == [0.25]
        assert a.uniform.tolist() == [policy.uniform(2, 0)]


class TestLogprobs:
    def test_the_most_that_a_sampling_row_wants(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], 9, logprobs=2), make([2], 9, logprobs=0), make([3], 9))
        _, built, a = build(harness)
        assert built.batch.bucket.num_logprobs == 5
        assert a.targets.tolist() == [0, 0, 0]

    def test_only_the_sampled_tokens(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], 9, logprobs=0))
        assert build(harness)[1].batch.bucket.num_logprobs == 0

    def test_prompt_tokens_are_scored_by_the_token_before_them(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make([1], 9))
        harness.step()
        harness.add(make(range(10, 20), 9, prompt_logprobs=3))
        _, built, a = build(harness)
        assert built.batch.bucket == Bucket(8, 2, 1, 2, 2 + 7, "greedy", 0, 5)
        (scored,) = built.scored
        assert (scored.row_index, scored.position) == (1, 1)
        assert (scored.num_tokens, scored.scored_row) == (7, 0)
        assert a.logits_idx.tolist() == [0, 7, *range(1, 8)]
        assert a.targets.tolist() == [0, 0, *range(11, 18)]
        harness.step()
        _, built, a = build(harness)
        (scored,) = built.scored
        # The last prompt token predicts output, and the first is predicted by nothing.
        assert (scored.position, scored.num_tokens) == (8, 2)
        assert a.targets.tolist() == [0, 0, 18, 19]
        harness.step()
        assert build(harness)[1].scored == ()

    def test_scoring_without_sampling_still_needs_logits(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make(12, 0, prompt_logprobs=0))
        _, built, _ = build(harness)
        assert built.batch.bucket == Bucket(8, 1, 0, 2, 1 + 8, "greedy", 0, 0)

    @pytest.mark.parametrize("caps", [Capabilities("numpy"), RECORD, STATIC])
    def test_every_prompt_token_is_scored_once_in_any_schedule(self, policy, make, caps):
        harness = policy.Harness(max_num_batched_tokens=16, caps=caps)
        requests = harness.add(
            make(range(13), 3, prompt_logprobs=1),
            make(range(30, 41), 0, prompt_logprobs=0),
            make(range(20, 25), 5),
        )
        seen = {}
        for step in range(40):
            if not harness.scheduler.has_work:
                break
            output, built, a = build(harness)
            for s in built.scored:
                request = output.rows[s.row_index].request
                place = s.row_index
                for i in range(s.num_tokens):
                    row = built.batch.bucket.num_seqs + s.scored_row + i
                    token = int(a.logits_idx[row])
                    assert a.query_start[place] <= token < a.query_start[place + 1]
                    assert a.positions[token] == s.position + i - 1
                    assert a.targets[row] == request.prompt_token_ids[s.position + i]
                    key = request.request_id, s.position + i
                    seen[key] = seen.get(key, 0) + 1
            harness.step()
            if step == 12:
                harness.scheduler.preempt_newest()
        expected = {(r.request_id, p) for r in requests[:2] for p in range(1, r.num_prompt_tokens)}
        assert seen == dict.fromkeys(expected, 1)


class TestEdits:
    def test_rows_are_padded_with_their_own_first_edit(self, policy, make):
        harness = policy.Harness(caps=STATIC)
        harness.add(
            make([1], 9, logit_bias={3: 1.5, 4: -2.0}),
            make([2], 9),
            make([5], 9, allowed_token_ids=[7, 8, 9], repetition_penalty=2.0),
        )
        _, built, a = build(harness)
        assert built.batch.bucket.num_edits == 16
        assert a.edit_ids[0].tolist() == [3, 4] + [3] * 14
        assert a.edit_add[0].tolist() == [1.5, -2.0] + [1.5] * 14
        assert a.edit_ids[1].tolist() == [0] * 16
        assert a.edit_scale[1].tolist() == [1.0] * 16
        assert a.edit_add[1].tolist() == [0.0] * 16
        assert a.edit_ids[2].tolist() == [7, 8, 9] + [7] * 13
        assert a.keep_only.tolist() == [0, 0, 1, 0]
        assert a.edit_scale[3].tolist() == [1.0] * 16

    def test_exact_width_where_shapes_are_free(self, policy, make):
        harness = policy.Harness()
        harness.add(make([1], 9, logit_bias={3: 1.5, 4: -2.0}), make([2], 9, logit_bias={5: 1.0}))
        _, built, a = build(harness)
        assert built.batch.bucket.num_edits == 2
        assert a.edit_ids.tolist() == [[3, 4], [5, 5]]

    def test_edits_of_rows_that_do_not_sample_and_spent_edits_cost_nothing(self, policy, make):
        harness = policy.Harness(max_num_batched_tokens=8)
        harness.add(make([1], 9, min_tokens=1, stop_ids=(3,)), make(20, 9, logit_bias={3: 1.0}))
        assert build(harness)[1].batch.bucket.num_edits == 1
        harness.update(harness.schedule(), [5, None])
        assert build(harness)[1].batch.bucket.num_edits == 0

    def test_penalties_survive_a_preemption(self, policy, make):
        harness = policy.Harness()
        request = harness.add(make([1], 9, frequency_penalty=1.0))
        for token in (5, 5, 6):
            harness.update(harness.schedule(), [token])
        harness.preempt()
        _, _, a = build(harness)
        assert dict(zip(a.edit_ids[0].tolist(), a.edit_add[0].tolist(), strict=True)) == {
            5: -2.0,
            6: -1.0,
        }
        assert request.num_tokens == 4


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    budget=st.integers(8, 40),
    caps=st.sampled_from([Capabilities("numpy"), RECORD, STATIC]),
)
def test_a_batch_is_what_its_rows_say(policy, lengths, budget, caps):
    """Every array against a slow definition, in every step of a random workload."""
    harness = policy.Harness(200, caps=caps, max_num_batched_tokens=budget)
    harness.add(*(policy.make_request([i] * n, 3) for i, n in enumerate(lengths)))
    while harness.scheduler.has_work:
        output, built, a = build(harness)
        check_rows(harness, output, built, a)
        harness.step()


def check_rows(harness, output, built, a):
    owned = set()
    for place, row in enumerate(output.rows):
        request, end = row.request, row.start + row.num_tokens
        table = harness.kv.block_ids(request)[: -(-end // 4)]
        tokens = range(a.query_start[place], a.query_start[place + 1])
        positions = list(range(row.start, end))
        assert a.seq_lens[place] == end
        assert a.block_table[place, : len(table)].tolist() == table.tolist()
        assert not a.block_table[place, len(table) :].any()
        assert a.positions[tokens].tolist() == positions
        assert a.slots[tokens].tolist() == [table[p // 4] * 4 + p % 4 for p in positions]
        assert a.token_ids[tokens].tolist() == request.token_ids(row.start, end)
        if len(a.logits_idx):
            assert a.logits_idx[place] == tokens[-1]
        owned.update(tokens)
    assert len(owned) == built.batch.live_tokens == output.num_tokens
    padding = sorted(set(range(built.batch.bucket.num_tokens)) - owned)
    assert not a.slots[padding].any()
    assert not a.seq_lens[len(output.rows) :].any()
    assert (np.diff(a.query_start) >= 0).all()
    assert a.query_start[built.batch.bucket.num_decodes] == built.batch.bucket.num_decodes
