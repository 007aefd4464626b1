"""Buckets: exact where shapes are free, a finite family where they are not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.errors import InternalError
from leadframe.platform.batch import Bucket, forward_bucket
from leadframe.platform.capabilities import Capabilities
from leadframe.runner.buckets import BucketPolicy, bucketed_logprobs

FREE = Capabilities("numpy")
RECORD = Capabilities("torch", graph="record")
STATIC = Capabilities("jax", graph="compile", static_shapes=True)


def policy_for(caps, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, **kwargs):
    return BucketPolicy(caps, max_num_seqs, max_num_batched_tokens, max_model_len, 16, **kwargs)


def decode(num_seqs, num_blocks, **kwargs):
    return Bucket(num_seqs, num_seqs, num_seqs, num_blocks, num_seqs, **kwargs)


def covers(bucket, needed):
    """Whether a step fits a bucket, whose decodes may have become chunk rows."""
    chunk_rows = needed.num_seqs - needed.num_decodes
    chunk_tokens = needed.num_tokens - needed.num_decodes
    if bucket.num_decodes == 0:
        chunk_rows, chunk_tokens = needed.num_seqs, needed.num_tokens
    scored = max(0, needed.num_logits - needed.num_seqs)
    return (
        (bucket.num_decodes == 0 or bucket.num_decodes >= needed.num_decodes)
        and bucket.num_seqs - bucket.num_decodes >= chunk_rows
        and bucket.num_tokens - bucket.num_decodes >= chunk_tokens
        and bucket.num_blocks >= needed.num_blocks
        and bucket.num_edits >= needed.num_edits
        and bucket.num_logprobs == needed.num_logprobs
        and (bucket.num_logits == 0 or bucket.num_logits >= bucket.num_seqs + scored)
        and (bucket.num_logits > 0 or needed.num_logits == 0)
    )


class TestExact:
    @pytest.mark.parametrize("policy", [policy_for(FREE), policy_for(RECORD, enforce_eager=True)])
    def test_nothing_is_padded_or_prepared(self, policy):
        needed = Bucket(37, 5, 3, 19, 8, "threshold", 7, 5)
        assert policy.bucket_for(needed) is needed
        assert policy.all_buckets() == []
        assert not policy.is_padded(needed)
        assert not policy.is_prepared(needed)


class TestRecord:
    def test_sizes(self):
        policy = policy_for(RECORD)
        assert policy.decode_sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64)
        assert policy.widths == (16, 64, 256)
        assert policy.all_buckets() == [
            decode(s, w) for s in policy.decode_sizes for w in (16, 64, 256)
        ]

    @pytest.mark.parametrize(
        ("rows", "blocks", "size", "width"),
        [(1, 1, 1, 16), (3, 16, 4, 16), (17, 17, 24, 64), (64, 256, 64, 256)],
    )
    def test_decode_steps_are_padded_to_what_is_prepared(self, rows, blocks, size, width):
        policy = policy_for(RECORD)
        bucket = policy.bucket_for(decode(rows, blocks))
        assert bucket == decode(size, width)
        assert policy.is_prepared(bucket)

    def test_other_ways_of_sampling_share_the_shapes(self):
        policy = policy_for(RECORD)
        bucket = policy.bucket_for(decode(3, 5, sample="threshold"))
        assert bucket == decode(4, 16, sample="threshold")
        assert policy.is_padded(bucket)
        assert not policy.is_prepared(bucket)

    @pytest.mark.parametrize(
        ("asked", "padded"),
        [
            ({"num_edits": 2}, {"num_edits": 16}),
            ({"num_edits": 17, "sample": "plain"}, {"num_edits": 32, "sample": "plain"}),
            ({"num_mask_words": 3}, {"num_mask_words": 3}),
            ({"num_logprobs": 5}, {"num_logprobs": 5}),
        ],
    )
    def test_edits_masks_and_logprobs_share_them_too(self, asked, padded):
        policy = policy_for(RECORD)
        assert policy.bucket_for(decode(3, 5, **asked)) == decode(4, 16, **padded)

    def test_the_usual_ways_to_sample_run_once_at_each_size(self):
        common = policy_for(RECORD, max_num_seqs=2).common_buckets()
        assert common == [
            decode(s, 16, sample=way) for s in (1, 2) for way in ("greedy", "plain", "threshold")
        ]
        assert policy_for(STATIC).common_buckets() == []
        assert policy_for(RECORD, enforce_eager=True).common_buckets() == []

    @pytest.mark.parametrize(
        "needed",
        [Bucket(20, 3, 2, 5, 3), Bucket(20, 1, 0, 5, 0, "skip"),
        ],
    )  # fmt: skip
    def test_every_other_step_is_exact(self, needed):
        policy = policy_for(RECORD)
        assert policy.bucket_for(needed) == needed
        assert not policy.is_padded(needed)

    @pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 48, 200])
    def test_the_largest_size_is_exactly_max_num_seqs(self, max_num_seqs):
        policy = policy_for(RECORD, max_num_seqs=max_num_seqs)
        assert policy.decode_sizes[-1] == max_num_seqs
        assert list(policy.decode_sizes) == sorted(set(policy.decode_sizes))


class TestStatic:
    def test_family(self):
        policy = policy_for(STATIC)
        assert policy.decode_sizes == (1, 2, 4, 8, 16, 32, 64)
        assert policy.token_sizes == (16, 32, 64, 128, 256, 512)
        assert len(set(map(forward_bucket, policy.all_buckets()))) == (7 + 6) * 3
        assert Bucket(128, 64, 0, 64, 64) in policy.all_buckets()
        assert Bucket(16, 16, 0, 16, 16) in policy.all_buckets()

    def test_the_usual_ways_to_sample_are_there_from_the_start_behind_the_shapes(self):
        policy = policy_for(STATIC)
        ways = [bucket.sample for bucket in policy.all_buckets()]
        assert ways == ["greedy"] * 39 + ["plain"] * 39 + ["threshold"] * 39
        for way in ("plain", "threshold"):
            for needed in (decode(3, 5, sample=way), Bucket(100, 2, 0, 7, 2, way)):
                assert policy.is_prepared(policy.bucket_for(needed))
        assert not policy.is_prepared(policy.bucket_for(decode(3, 5, sample="sort")))

    def test_mixed_steps_count_their_decodes_as_chunk_rows(self):
        policy = policy_for(STATIC)
        assert policy.bucket_for(Bucket(100, 9, 8, 20, 9)) == Bucket(128, 64, 0, 64, 64)

    def test_a_step_that_samples_nothing_runs_as_greedy(self):
        policy = policy_for(STATIC)
        bucket = policy.bucket_for(Bucket(100, 1, 0, 7, 0, "skip"))
        assert bucket == Bucket(128, 64, 0, 16, 64)
        assert policy.is_prepared(bucket)

    def test_scored_rows_edits_and_logprobs_take_few_values(self):
        policy = policy_for(STATIC)
        bucket = policy.bucket_for(Bucket(100, 2, 0, 7, 2 + 33, "plain", 17, 5))
        assert bucket == Bucket(128, 64, 0, 16, 64 + 64, "plain", 32, 5)
        assert policy.is_padded(bucket)

    def test_more_than_the_limits_is_an_internal_error(self):
        policy = policy_for(STATIC)
        with pytest.raises(InternalError, match="needs 65"):
            policy.bucket_for(decode(65, 1))
        with pytest.raises(InternalError, match="needs 257"):
            policy.bucket_for(decode(1, 257))


class TestMaxGraphs:
    @pytest.mark.parametrize("caps", [RECORD, STATIC])
    @pytest.mark.parametrize("max_graphs", [*range(1, 30), 100])
    def test_start_up_prepares_no_more_and_the_largest_step_still_fits(self, caps, max_graphs):
        limited = Capabilities(
            caps.family, graph=caps.graph, static_shapes=caps.static_shapes, max_graphs=max_graphs
        )
        policy = policy_for(limited)
        assert 0 < len(set(map(forward_bucket, policy.all_buckets()))) <= max_graphs
        for needed in (decode(64, 256), Bucket(512, 64, 10, 256, 64)):
            assert covers(policy.bucket_for(needed), needed)

    def test_widths_go_first(self):
        policy = policy_for(Capabilities("torch", graph="record", max_graphs=10))
        assert policy.widths == (256,)
        assert len(policy.decode_sizes) == 9


def test_logprob_counts():
    assert [bucketed_logprobs(n) for n in (0, 1, 5, 6, 20)] == [0, 5, 5, 20, 20]


steps = st.tuples(
    st.integers(0, 40), st.integers(0, 24), st.integers(1, 60), st.integers(1, 256),
    st.sampled_from(["skip", "greedy", "plain", "threshold", "sort"]), st.integers(0, 40),
    st.integers(0, 300), st.sampled_from([None, 0, 5, 20]),
)  # fmt: skip


@settings(max_examples=300)
@given(caps=st.sampled_from([FREE, RECORD, STATIC]), step=steps)
def test_every_step_fits_its_bucket_and_the_static_family_is_finite(caps, step):
    decodes, chunks, per_chunk, blocks, sample, scored, edits, logprobs = step
    rows = max(1, decodes + chunks)
    tokens = min(512, max(rows, decodes + chunks * per_chunk))
    decodes = min(decodes, rows)
    samples = sample != "skip"
    needed = Bucket(
        tokens, rows, decodes, blocks, (rows + scored) * samples, sample,
        edits * samples, logprobs if samples else None,
    )  # fmt: skip
    policy = policy_for(caps)
    bucket = policy.bucket_for(needed)
    assert covers(bucket, needed)
    assert policy.bucket_for(bucket) == bucket
    if caps is STATIC:
        assert policy.is_padded(bucket)
        assert bucket.num_edits in (0, 16, 32, 64, 128, 256, 512)
