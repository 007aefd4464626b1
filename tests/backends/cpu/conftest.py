"""CPU backends with and without native kernels, and ways to compare them with the oracle."""

import numpy as np
import pytest
import torch

from leadframe.conformance.attention_cases import expected
from leadframe.platform import reference_ops, unpack
from leadframe.platform.reference.namespace import numpy_namespace
from leadframe_cpu.backend import CpuBackend


@pytest.fixture(scope="session")
def native():
    """A backend on native kernels, with more threads than a small test has work for."""
    return CpuBackend(threads=3, native="on")


@pytest.fixture(scope="session")
def plain():
    """A backend on torch's ops alone."""
    threads = torch.get_num_threads()
    backend = CpuBackend(threads=1, native="off")
    torch.set_num_threads(threads)
    return backend


@pytest.fixture(scope="session")
def oracle():
    return reference_ops(numpy_namespace(), np.float64)


@pytest.fixture
def rng():
    return np.random.default_rng(23)


@pytest.fixture
def solve():
    """Runs a problem of the kit's: (result, oracle's result, pool, oracle's pool)."""

    def run(backend, problem):
        dtype = problem.shape.dtype
        kv = backend.kv_alloc(problem.kv_spec, len(problem.pool))
        blocks = range(len(problem.pool))
        kv[0] = backend.kv_write(kv[0], blocks, problem.pool.astype(np.float32))
        k, v, q = (
            backend.upload(getattr(problem, name).astype(np.float32), dtype) for name in "kvq"
        )
        batch = problem.batch
        arrays = unpack(batch.bucket, torch.from_numpy(batch.ints), torch.from_numpy(batch.floats))
        plan = backend.ops["plan"](arrays, problem.params)
        kv[0] = backend.ops["kv_append"](kv[0], k, v, plan)
        out = backend.ops["attention"](q, kv[0], plan, problem.params)
        want, want_pool = expected(problem)
        got_pool = backend.kv_read(kv[0], blocks)
        backend.kv_free(kv)
        return backend.download(out), want, got_pool, want_pool

    return run
