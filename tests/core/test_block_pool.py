"""The block pool: states, order of reuse, and random operations against plain lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.errors import InternalError
from leadframe.kv_cache import BlockPool


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_too_few_blocks_is_an_error_and_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(InternalError, match="4 blocks taken from a pool with 3 free"):
        pool.take(4)
    assert pool.num_free == 3
    pool.check({})


def test_a_pool_needs_a_block_besides_the_null_block():
    with pytest.raises(InternalError, match="at least 2"):
        BlockPool(1)


def test_a_block_is_freed_by_its_last_holder():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.acquire(block)
    pool.release(block)
    assert not pool.is_free(block)
    pool.check({block: 1})
    pool.release(block)
    assert pool.is_free(block)
    pool.check({})


@pytest.mark.parametrize("block", [0, 1])
def test_freeing_what_nobody_holds_is_an_error(block):
    with pytest.raises(InternalError, match=f"block {block} is freed, and nobody holds it"):
        BlockPool(4).release(block)


def test_uncached_blocks_are_reused_before_cached_ones_and_those_least_recently_freed_first():
    pool = BlockPool(6)
    blocks = pool.take(5)
    for block in (1, 2, 4):
        pool.publish(block, b"%d" % block)
    for block in reversed(blocks):
        pool.release(block)
    assert list(pool.free_blocks()) == [3, 5, 4, 2, 1]


def test_a_cached_free_block_is_revived_from_the_middle_of_the_queue():
    pool = BlockPool(5)
    for block in pool.take(4):
        pool.publish(block, b"%d" % block)
        pool.release(block)
    pool.acquire(pool.lookup(b"2"))
    assert list(pool.free_blocks()) == [1, 3, 4]
    assert pool.num_free == 3
    pool.check({2: 1})


def test_taking_a_cached_block_forgets_its_content():
    pool = BlockPool(3)
    for block in pool.take(2):
        pool.publish(block, b"%d" % block)
        pool.release(block)
    assert pool.take(1) == [1]
    assert pool.lookup(b"1") is None
    assert pool.lookup(b"2") == 2


def test_the_first_block_with_a_content_is_the_one_that_is_found():
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.publish(first, b"other")
    assert pool.lookup(b"same") == first
    assert pool.lookup(b"other") is None
    pool.forget(second)
    assert pool.lookup(b"same") == first
    pool.forget(first)
    assert pool.lookup(b"same") is None
    assert pool.num_cached == 0
    pool.check({first: 1, second: 1, third: 1})


def test_forget_all_keeps_holders():
    pool = BlockPool(4)
    held, freed = pool.take(2)
    pool.publish(held, b"held")
    pool.publish(freed, b"freed")
    pool.release(freed)
    pool.forget_all()
    assert pool.lookup(b"held") is pool.lookup(b"freed") is None
    pool.check({held: 1})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool: pool._ref_counts.__setitem__(1, 2), "ref count 2, in 1 tables"),
        (lambda pool: pool._ref_counts.__setitem__(3, 1), "ref count 1, in 0 tables"),
        (lambda pool: setattr(pool, "num_free", 1), "the free queue has 2 blocks, counted 1"),
        (lambda pool: pool._previous.__setitem__(3, 1), "torn"),
        (lambda pool: pool._link(2, 0), "free queue"),
        (lambda pool: pool._cached.__setitem__(b"x", 1), "hash index"),
        (lambda pool: pool._hashes.__setitem__(2, b"x"), "hash index"),
        (lambda pool: pool._ref_counts.__setitem__(0, 1), "null block"),
    ],
)
def test_check_finds_each_kind_of_damage(harm, message):
    pool = BlockPool(4)
    pool.take(1)
    pool.check({1: 1})
    harm(pool)
    with pytest.raises(InternalError, match=message):
        pool.check({1: 1})


def test_check_compares_ref_counts_with_the_tables():
    pool = BlockPool(4)
    pool.take(1)
    for holders in ({}, {1: 2}, {1: 1, 2: 1}, {0: 1, 1: 1}):
        with pytest.raises(InternalError):
            pool.check(holders)


class NaivePool:
    """The same rules over lists, with no thought for speed."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(self.free, 0)
        self.hashes = {}

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.refs[block] = 1
            self.hashes.pop(block, None)
        return taken

    def acquire(self, block):
        if block in self.free:
            self.free.remove(block)
        self.refs[block] += 1

    def release(self, block):
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.insert(len(self.free) if block in self.hashes else 0, block)

    def publish(self, block, content):
        if block not in self.hashes and content not in self.hashes.values():
            self.hashes[block] = content

    def forget(self, block):
        self.hashes.pop(block, None)


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "acquire", "release", "release", "publish", "publish", "forget", "all"]
        ),
        st.integers(0, 100),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(num_blocks=st.integers(2, 9), operations=operations)
def test_random_operations_agree_with_plain_lists(num_blocks, operations):
    pool, naive = BlockPool(num_blocks), NaivePool(num_blocks)
    for name, number in operations:
        play(pool, naive, name, number)
        pool.check({block: refs for block, refs in naive.refs.items() if refs})
        assert list(pool.free_blocks()) == naive.free
        assert {block: pool.lookup(h) for block, h in naive.hashes.items()} == {
            block: block for block in naive.hashes
        }
        assert pool.num_cached == len(naive.hashes)


def play(pool, naive, name, number):
    held = [block for block, refs in naive.refs.items() if refs]
    findable = [block for block in naive.refs if naive.refs[block] or block in naive.hashes]
    content = bytes([number % 5])
    if name == "take":
        count = number % (pool.num_free + 1)
        assert pool.take(count) == naive.take(count)
    elif name == "acquire" and findable:
        pool.acquire(findable[number % len(findable)])
        naive.acquire(findable[number % len(findable)])
    elif name == "release" and held:
        pool.release(held[number % len(held)])
        naive.release(held[number % len(held)])
    elif name == "publish" and held:
        pool.publish(held[number % len(held)], content)
        naive.publish(held[number % len(held)], content)
    elif name == "forget" and findable:
        pool.forget(findable[number % len(findable)])
        naive.forget(findable[number % len(findable)])
    elif name == "all":
        pool.forget_all()
        naive.hashes.clear()
