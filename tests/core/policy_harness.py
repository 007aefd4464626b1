"""Scheduler, KV cache manager and batch builder over a model that notices their mistakes.

Loaded by the `policy` fixture of conftest.py.
"""

import zlib
from itertools import count

import numpy as np

from leadframe.config import SchedulerConfig
from leadframe.kv_cache import KVCacheManager
from leadframe.platform.batch import unpack
from leadframe.platform.capabilities import Capabilities
from leadframe.request import Request
from leadframe.runner.batch_builder import BatchBuilder
from leadframe.runner.buckets import BucketPolicy
from leadframe.runner.uniforms import WINDOW, uniform_windows
from leadframe.sampling_params import SamplingParams
from leadframe.scheduler import Scheduler

VOCAB = 50
_ids = count()


def make_request(prompt, max_tokens=4, *, request_id=None, stop_ids=(), salt="", **kwargs):
    """A request whose prompt is a list of ids, or that many ids counted from 0."""
    prompt = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    priority, seed = kwargs.pop("priority", 0), kwargs.pop("seed", 0)
    kwargs.setdefault("temperature", 0.0)
    return Request(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids, **kwargs),
        seed=seed,
        stop_ids=frozenset(stop_ids),
        max_total_tokens=len(prompt) + max_tokens,
        priority=priority,
        cache_salt=salt,
    )


def _chain(previous, token):
    return zlib.crc32(np.int64(token).tobytes(), previous)


def _next_token(chain, uniform):
    return (chain + int(uniform * 2**24)) % VOCAB


def uniform(seed, position):
    windows = uniform_windows(np.array([seed % 2**64], np.uint64), np.array([position // WINDOW]))
    return float(windows[0, position % WINDOW])


def solo_tokens(request):
    """What the model says to a request that is alone and has all the memory in the world."""
    chain = 0
    for token in request.prompt_token_ids:
        chain = _chain(chain, token)
    output = []
    params = request.params
    while len(request.prompt_token_ids) + len(output) < request.max_total_tokens:
        draw = 0.0 if params.is_greedy else uniform(request.seed, len(output))
        output.append(_next_token(chain, draw))
        chain = _chain(chain, output[-1])
        if output[-1] in request.stop_ids and len(output) >= params.min_tokens:
            break
    return output


class PagedModel:
    """A model whose K/V of a token is a checksum of that token and of all before it.

    It reads them through the block table, so that a wrong slot, position, table or reused block
    raises or changes what it says.
    """

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.chains = np.zeros(num_blocks * block_size, np.int64)
        self.positions = np.full(num_blocks * block_size, -1)

    def run(self, built):
        """Returns a token for every row of the batch; those of padding are meaningless."""
        bucket = built.batch.bucket
        arrays = unpack(bucket, built.batch.ints, built.batch.floats)
        tokens = []
        for row in range(bucket.num_seqs):
            first, end = arrays.query_start[row], arrays.query_start[row + 1]
            chain = 0
            if arrays.seq_lens[row]:
                for t in range(first, end):
                    chain = self._append(arrays, row, t)
                assert arrays.positions[end - 1] == arrays.seq_lens[row] - 1
            draws = arrays.temperature is not None and arrays.temperature[row] > 0
            tokens.append(_next_token(chain, float(arrays.uniform[row]) if draws else 0.0))
        return tokens

    def _append(self, arrays, row, t):
        position, slot = int(arrays.positions[t]), int(arrays.slots[t])
        slots = self._slots(arrays.block_table[row], position + 1)
        assert slot == slots[-1] >= self.block_size
        before = slots[:-1]
        np.testing.assert_array_equal(
            self.positions[before], np.arange(position), "slots that nobody computed are read"
        )
        previous = self.chains[before[-1]] if position else 0
        self.chains[slot] = _chain(int(previous), int(arrays.token_ids[t]))
        self.positions[slot] = position
        return int(self.chains[slot])

    def _slots(self, table, num_tokens):
        positions = np.arange(num_tokens)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size


class Harness:
    """The whole policy core over a `PagedModel`; every step is checked."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        *,
        caching=True,
        max_model_len=128,
        caps=None,
        **config,
    ):
        config = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.kv, max_model_len)
        seqs, tokens = config["max_num_seqs"], config["max_num_batched_tokens"]
        caps = caps or Capabilities("numpy")
        policy = BucketPolicy(caps, seqs, tokens, max_model_len, block_size)
        self.builder = BatchBuilder(block_size, seqs, policy)
        self.model = PagedModel(num_blocks, block_size)
        self.outputs = []

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
        return requests[0] if len(requests) == 1 else requests

    def schedule(self):
        """Schedules; checks what must hold of every output."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        config = self.scheduler.config
        assert output.num_tokens == sum(row.num_tokens for row in output.rows)
        assert output.num_tokens <= config.max_num_batched_tokens
        assert len({row.request.request_id for row in output.rows}) == len(output.rows)
        assert all(row.num_tokens == 1 for row in output.rows[: output.num_decodes])
        assert all(row.samples for row in output.rows[: output.num_decodes])
        assert all(row.start == row.request.num_computed_tokens for row in output.rows)
        return output

    def execute(self, output):
        built = self.builder.build(output)
        tokens = self.model.run(built)
        rows = zip(output.rows, tokens, strict=False)  # the batch may be padded
        return [token if row.samples else None for row, token in rows]

    def update(self, output, sampled):
        finished = self.scheduler.update(output, sampled)
        self.scheduler.check()
        return finished

    def step(self):
        output = self.schedule()
        self.outputs.append(output)
        if output.rows:
            self.update(output, self.execute(output))
        return output

    def preempt(self):
        """Preempts one request; the step that reports it admits nothing."""
        victim = self.scheduler.preempt_newest()
        assert self.step().preempted == [victim]
        return victim

    def run(self, limit=2000):
        """Steps until nothing is left; fails when the scheduler stops moving."""
        steps = 0
        while self.scheduler.has_work:
            output = self.step()
            assert output.rows or output.preempted, "there is work, and nothing was chosen"
            steps += 1
            assert steps < limit, "the requests do not end"
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.kv.usage == 0
        return steps
