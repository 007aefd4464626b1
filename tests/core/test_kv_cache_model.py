"""Random operations on the KV cache manager against a brute-force model of lists and tuples."""

from hypothesis import given, settings
from hypothesis import strategies as st

from leadframe.kv_cache import KVCacheManager

BLOCK = 2


class NaiveCache:
    """The same rules with whole prefixes for keys and lists for everything."""

    def __init__(self, num_blocks):
        self.free_order = list(range(1, num_blocks))
        self.tables = {}
        self.committed = {}
        self.known_at_admission = {}
        self.muted = set()
        self.contents = {}  # block → (salt, tokens of the whole prefix)

    def prefix(self, request, num_blocks):
        return request.cache_salt, tuple(request.token_ids(0, num_blocks * BLOCK))

    def find(self, content):
        return next((block for block, known in self.contents.items() if known == content), None)

    def hits(self, request):
        blocks = []
        for i in range((request.num_tokens - 1) // BLOCK):
            block = self.find(self.prefix(request, i + 1))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_being_computed(self, request, requests):
        index = len(self.hits(request)) + 1
        if index > (request.num_tokens - 1) // BLOCK:
            return False
        wanted = self.prefix(request, index)
        return any(
            other.request_id in self.tables
            and other.request_id not in self.muted
            and self.committed[other.request_id] < index
            and index <= self.known_at_admission[other.request_id]
            and self.prefix(other, index) == wanted
            for other in requests
        )

    def take(self, count):
        taken, self.free_order = self.free_order[:count], self.free_order[count:]
        for block in taken:
            self.contents.pop(block, None)
        return taken

    def admit(self, request, reserved):
        hits = self.hits(request)
        total = -(-request.num_tokens // BLOCK)
        left = [block for block in self.free_order if block not in hits]
        if total - len(hits) + reserved > len(left):
            return False
        self.free_order = left
        self.tables[request.request_id] = hits + self.take(total - len(hits))
        self.committed[request.request_id] = len(hits)
        self.known_at_admission[request.request_id] = request.num_tokens // BLOCK
        self.muted.discard(request.request_id)
        return True

    def allocate(self, request, count):
        table = self.tables[request.request_id]
        missing = -(-(request.num_computed_tokens + count) // BLOCK) - len(table)
        if missing > len(self.free_order):
            return False
        table += self.take(max(0, missing))
        return True

    def commit(self, request):
        table = self.tables[request.request_id]
        for i in range(request.num_computed_tokens // BLOCK):
            content = self.prefix(request, i + 1)
            new = i >= self.committed[request.request_id]
            if new and request.request_id not in self.muted and self.find(content) is None:
                self.contents[table[i]] = content
        self.committed[request.request_id] = request.num_computed_tokens // BLOCK

    def free(self, request, discard):
        table = self.tables.pop(request.request_id)
        for block in reversed(table):
            if discard:
                self.contents.pop(block, None)
            if not any(block in other for other in self.tables.values()):
                end = len(self.free_order) if block in self.contents else 0
                self.free_order.insert(end, block)
        return [block for block in table if block in self.free_order] if discard else []

    def reset(self):
        self.contents.clear()
        self.muted |= set(self.tables)


operations = st.lists(
    st.tuples(
        st.sampled_from(["new", "admit", "admit", "grow", "grow", "compute", "free", "discard"] * 3
                        + ["reset"] * 2),
        st.integers(0, 1000),
    ),
    max_size=60,
)  # fmt: skip


class Comparison:
    """Plays each operation on both and compares everything that can be seen."""

    def __init__(self, policy, num_blocks):
        self.make = policy.make_request
        self.kv = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=True)
        self.naive = NaiveCache(num_blocks)
        self.requests = []

    def play(self, name, number):
        held = [r for r in self.requests if r.request_id in self.naive.tables]
        waiting = [r for r in self.requests if r.request_id not in self.naive.tables]
        if name == "new":
            prompt = [int(i == number % 16) for i in range(1 + number % 7)]
            self.requests.append(self.make(prompt, salt="s" * (number % 5 == 0)))
        elif name == "reset":
            self.kv.reset_prefix_cache()
            self.naive.reset()
        elif name == "admit" and waiting:
            self.admit(waiting[number % len(waiting)], number % 3)
        elif name != "admit" and held:
            getattr(self, name)(held[number % len(held)], number)
        self.compare()

    def admit(self, request, reserved):
        cached = self.kv.match_prefix(request)
        assert cached == len(self.naive.hits(request)) * BLOCK
        expected = self.naive.is_being_computed(request, self.requests)
        assert self.kv.is_being_computed(request, cached) == expected
        admitted = self.kv.admit(request, cached, reserved)
        assert admitted == self.naive.admit(request, reserved)
        if admitted:
            request.num_computed_tokens = cached

    def grow(self, request, number):
        """A token is sampled; the next step may compute it."""
        count = request.num_tokens + 1 - request.num_computed_tokens
        grown = self.kv.allocate(request, count)
        assert grown == self.naive.allocate(request, count)
        if grown:
            request.output_token_ids.append(number % 2)

    def compute(self, request, number):
        left = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens += min(left, 1 + number % 5)
        self.kv.commit(request)
        self.naive.commit(request)

    def free(self, request, number, *, discard=False):
        assert self.kv.free(request, discard=discard) == self.naive.free(request, discard)
        request.num_computed_tokens = 0

    def discard(self, request, number):
        self.free(request, number, discard=True)

    def compare(self):
        self.kv.check()
        assert self.kv.num_free_blocks == len(self.naive.free_order)
        assert list(self.kv._pool.free_blocks()) == self.naive.free_order
        for request in self.requests:
            table = self.naive.tables.get(request.request_id, [])
            assert self.kv.block_ids(request).tolist() == table


@settings(max_examples=200)
@given(num_blocks=st.integers(3, 12), operations=operations)
def test_random_operations_agree_with_the_brute_force_model(policy, num_blocks, operations):
    comparison = Comparison(policy, num_blocks)
    for name, number in operations:
        comparison.play(name, number)
