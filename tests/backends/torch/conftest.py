"""A plain torch backend on the host, and ways to compare it with the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leadframe.conformance.attention_cases import expected
from leadframe.platform import Capabilities, MemoryInfo, reference_ops, unpack
from leadframe.platform.reference.namespace import numpy_namespace
from leadframe_torch import ATTENTION_FEATURES, TorchBackend


class PretendLayer:
    """Host memory with a limit, so that running out of it can be tested."""

    def __init__(self, total=1 << 30, graphs=None):
        self.device = torch.device("cpu")
        self.graphs = graphs
        self.total = total
        self.released = 0

    def memory(self, held):
        return MemoryInfo(self.total, self.total - held.current, held.current, held.peak)

    def synchronize(self):
        pass

    def release_cached(self):
        self.released += 1


CAPS = Capabilities(
    family="torch",
    compute_dtypes=("float32", "bfloat16"),
    kv_dtypes=("float32", "bfloat16"),
    block_sizes=(16, 4),
    attention_features=ATTENTION_FEATURES,
)


@pytest.fixture(scope="session")
def make_backend():
    def make(total=1 << 30, graphs=None, **settings):
        caps = replace(CAPS, graph="none" if graphs is None else "record")
        return TorchBackend(PretendLayer(total, graphs), caps, **settings)

    return make


@pytest.fixture
def backend(make_backend):
    return make_backend()


@pytest.fixture(scope="session")
def oracle():
    return reference_ops(numpy_namespace(), np.float64)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def solve():
    """Runs a problem of the kit's: (result, oracle's result, pool, oracle's pool)."""

    def run(backend, problem):
        dtype = problem.shape.dtype
        kv = backend.kv_alloc(problem.kv_spec, len(problem.pool))
        blocks = range(len(problem.pool))
        kv[0] = backend.kv_write(kv[0], blocks, problem.pool.astype(np.float32))
        sides = [backend.upload(x.astype(np.float32), dtype) for x in (problem.k, problem.v)]
        q = backend.upload(problem.q.astype(np.float32), dtype)
        batch = problem.batch
        arrays = unpack(batch.bucket, torch.from_numpy(batch.ints), torch.from_numpy(batch.floats))
        ops = backend.ops
        plan = ops["plan"](arrays, problem.params)
        kv[0] = ops["kv_append"](kv[0], *sides, plan)
        out = ops["attention"](q, kv[0], plan, problem.params)
        want, want_pool = expected(problem)
        return backend.download(out), want, backend.kv_read(kv[0], blocks), want_pool

    return run
