"""From the masks of requests to the logits of a step: packing, buckets, edits, the op."""

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadframe.platform.batch import Bucket, packed_sizes, unpack
from leadframe.platform.capabilities import Capabilities
from leadframe.platform.reference_ops import reference_ops
from leadframe.runner.logit_edits import LogitEdits

OPS = reference_ops(np)
STATIC = Capabilities("jax", graph="compile", static_shapes=True)
RECORD = Capabilities("torch", graph="record")


class Fixed:
    """A constraint with the same mask always."""

    def __init__(self, *masked, vocab=50):
        flags = np.ones(-(-vocab // 32) * 32, bool)
        flags[:vocab] = False
        flags[list(masked)] = True
        self.words = np.packbits(flags, bitorder="little").view(np.int32)
        self.error, self.is_complete, self.calls = None, False, 0

    def advance(self, output_token_ids):
        pass

    def mask(self):
        self.calls += 1
        return self.words


@pytest.fixture
def make(policy):
    return policy.make_request


def constrained(make, constraint, *args, **kwargs):
    request = make(*args, **kwargs)
    request.constraint = constraint
    return request


def build(harness):
    built = harness.builder.build(harness.schedule())
    return built, unpack(built.batch.bucket, built.batch.ints, built.batch.floats)


@given(st.integers(1, 100), st.integers(1, 4), st.data())
def test_a_bit_a_token(vocab, rows, data):
    """The op against a loop over tokens; what stands past the vocabulary is noise."""
    words = st.lists(
        st.integers(-(2**31), 2**31 - 1), min_size=-(-vocab // 32), max_size=-(-vocab // 32)
    )
    mask = np.array([data.draw(words) for _ in range(rows)], np.int32)
    logits = np.arange(rows * vocab, dtype=np.float32).reshape(rows, vocab) - 7
    want = logits.copy()
    for row in range(rows):
        for token in range(vocab):
            if int(mask[row, token // 32]) >> (token % 32) & 1:
                want[row, token] = -np.inf
    np.testing.assert_array_equal(OPS["mask_logits"](logits.copy(), mask), want)


def test_the_op_stays_inside_the_array_api_standard(strict_namespace):
    ops = reference_ops(strict_namespace)
    logits = array_api_strict.asarray(np.ones((1, 40), np.float32))
    mask = array_api_strict.asarray(np.array([[-(2**31) + 2, -3]], np.int32))
    got = np.array(ops["mask_logits"](logits, mask)._array)
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == [1, 31, 32, *range(34, 40)]


def test_steps_without_constraints_pay_nothing(policy, make):
    harness = policy.Harness()
    harness.add(make(5), make(3))
    built, arrays = build(harness)
    assert arrays.token_mask is None
    assert built.batch.bucket.num_mask_words == 0


def test_each_row_has_its_own_mask(policy, make):
    harness = policy.Harness()
    one, other = Fixed(3, 49), Fixed(*range(40))
    harness.add(constrained(make, one, 5), make(3), constrained(make, other, 4))
    built, arrays = build(harness)
    assert built.batch.bucket.num_mask_words == 2
    np.testing.assert_array_equal(arrays.token_mask, [one.words, [0, 0], other.words])
    assert packed_sizes(built.batch.bucket)[0] == built.batch.ints.size


def test_a_chunk_that_does_not_sample_asks_for_no_mask(policy, make):
    harness = policy.Harness(max_num_seqs=2, max_num_batched_tokens=4)
    constraint = Fixed(1)
    harness.add(constrained(make, constraint, 7))
    output = harness.schedule()
    assert not output.rows[0].samples
    assert harness.builder.build(output).batch.bucket.num_mask_words == 0
    harness.update(output, [None])
    _, arrays = build(harness)
    assert constraint.calls == 1
    np.testing.assert_array_equal(arrays.token_mask, [constraint.words])


@pytest.mark.parametrize("caps", [STATIC, RECORD])
def test_padded_rows_mask_nothing(policy, make, caps):
    harness = policy.Harness(caps=caps)
    requests = [constrained(make, Fixed(1, 2), 3) for _ in range(3)]
    harness.add(*requests)
    harness.step()
    built, arrays = build(harness)
    bucket = built.batch.bucket
    assert (bucket.num_mask_words, len(arrays.token_mask)) == (2, bucket.num_seqs)
    assert bucket.num_seqs == 4
    assert not arrays.token_mask[3:].any()
    assert arrays.token_mask[:3].any(axis=1).all()


def test_masks_share_the_family_of_static_shapes(policy, make):
    """A bucket with masks is its greedy bucket with W words; none is prepared for itself."""
    harness = policy.Harness(caps=STATIC)
    policy_ = harness.builder._policy
    needed = Bucket(3, 3, 3, 1, 3, num_mask_words=2)
    bucket = policy_.bucket_for(needed)
    assert bucket.num_mask_words == 2
    assert policy_.is_padded(bucket)
    assert not policy_.is_prepared(bucket)


@given(
    left=st.sets(st.integers(0, 39), min_size=1, max_size=4),
    stops=st.sets(st.integers(0, 39), max_size=30),
    words=st.sets(st.integers(0, 39), max_size=30),
)
def test_bans_yield_where_they_and_the_mask_would_leave_nothing(policy, left, stops, words):
    masked = set(range(40)) - left
    request = policy.make_request(
        3, 9, stop_ids=sorted(stops), min_tokens=5, bad_words_ids=[[word] for word in words]
    )
    ids, _, add = LogitEdits(request).current(Fixed(*masked, vocab=40).words)
    banned = set(ids[np.isneginf(add)].tolist())
    asked = stops | words
    assert banned == (asked if left - asked else set())
