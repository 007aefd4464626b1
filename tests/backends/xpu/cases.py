"""Batches of every shape that matters to paged attention, and a float64 oracle for them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from leadframe.conformance.batches import BatchSpec, Padding, Row, live_tokens, make_batch
from leadframe.platform import AttnParams, KVLayerSpec, KVSpec, reference_ops, unpack
from leadframe.platform.reference.namespace import numpy_namespace

NO_PADDING = Padding()
ORACLE = reference_ops(numpy_namespace(), np.float64)


@dataclass(frozen=True)
class Case:
    """One attention layer and one batch."""

    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    padding: Padding = NO_PADDING
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None

    @property
    def params(self) -> AttnParams:
        return AttnParams.of(self.dim**-0.5, self.window, self.softcap)


DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 40))
CHUNKS = ((7, 7), (20, 33), (1, 18), (16, 48))
PADDED = Padding(decodes=2, rows=1, tokens=3, blocks=1)

CASES = {
    "decodes": Case(DECODES, 5),
    "chunks": Case(CHUNKS, 0),
    "mixed": Case(DECODES + CHUNKS, 5),
    "mixed padded": Case(DECODES + CHUNKS, 5, PADDED),
    "decodes padded": Case(DECODES, 5, Padding(decodes=3)),
    # with its padding, rows * longest row is the number of tokens
    "looks even": Case(((4, 4), (2, 9)), 0, Padding(tokens=2)),
    "one chunk padded": Case(((5, 5),), 0, Padding(tokens=3)),
    "window": Case(DECODES + CHUNKS, 5, PADDED, window=5),
    "window of one": Case(DECODES + CHUNKS, 5, window=1),
    "softcap": Case(DECODES + CHUNKS, 5, PADDED, softcap=2.0),
    "window and softcap": Case(DECODES + CHUNKS, 5, PADDED, window=20, softcap=2.0),
    "one group": Case(DECODES + CHUNKS, 5, heads=4, kv_heads=4),
    "one kv head": Case(DECODES + CHUNKS, 5, heads=5, kv_heads=1),
    "dim 128": Case(DECODES + CHUNKS, 5, dim=128),
    "block 32": Case(DECODES + CHUNKS, 5, PADDED, block_size=32),
}


def spec_of(case: Case, seed: int = 0) -> BatchSpec:
    """Gives each row blocks of its own, in a random order, never the null block."""
    counts = [-(-length // case.block_size) for _, length in case.rows]
    ids = np.random.default_rng(seed).permutation(sum(counts)) + 1
    ends = np.cumsum(counts)
    rows = [
        Row(n, length, tuple(map(int, ids[end - count : end])))
        for (n, length), count, end in zip(case.rows, counts, ends, strict=True)
    ]
    return BatchSpec(tuple(rows), case.block_size, case.num_decodes, case.padding)


def num_blocks(case: Case) -> int:
    return sum(-(-length // case.block_size) for _, length in case.rows) + 2


def step_arrays(case: Case, *, change=None):
    """The batch as torch tensors on the host; `change` may replace NumPy fields first."""
    batch = make_batch(spec_of(case))
    arrays = unpack(batch.bucket, batch.ints.copy(), batch.floats)
    if change is not None:
        arrays = change(arrays)
    named = {f.name: getattr(arrays, f.name) for f in fields(arrays)}
    given = {n: torch.from_numpy(v) for n, v in named.items() if isinstance(v, np.ndarray)}
    return replace(arrays, **given)


def random(shape, seed, dtype):
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(values).to(dtype)


def run_case(backend, case: Case, dtype: torch.dtype, *, poison: float | None = None):
    """Fills the cache through `kv_write`, appends, attends; returns (result, oracle, live).

    Args:
      backend: whose ops run.
      case: what to run.
      dtype: of queries and cache.
      poison: what slots hold that no token of the step may see; None leaves them as they are.

    Returns:
      float64 [T, H, D] twice, and the indices of tokens that are not padding.
    """
    spec, name = spec_of(case), str(dtype).removeprefix("torch.")
    layers = (KVLayerSpec(case.kv_heads, case.dim),)
    kv = backend.kv_alloc(KVSpec(layers, case.block_size, name), num_blocks(case))
    shape = (num_blocks(case), 2, case.block_size, case.kv_heads, case.dim)
    content = random(shape, 1, dtype).double().numpy()
    if poison is not None:
        content = np.where(_readable(case, spec)[:, None, :, None, None], content, poison)
    arrays = step_arrays(case)
    tokens = arrays.bucket.num_tokens
    # heads apart from each other, as no kernel takes them
    q = random((case.heads, tokens, case.dim), 2, dtype).transpose(0, 1)
    k, v = (random((case.kv_heads, tokens, case.dim), s, dtype).transpose(0, 1) for s in (3, 4))
    if poison is not None:
        padding = np.setdiff1d(np.arange(tokens), live_tokens(spec))
        k[padding] = v[padding] = poison
    ids = list(range(num_blocks(case)))
    layer = backend.kv_write(kv[0], ids, content.astype(np.float32))
    plan = backend.ops["plan"](arrays, case.params)
    layer = backend.ops["kv_append"](layer, k, v, plan)
    result = backend.ops["attention"](q, layer, plan, case.params).double().numpy()
    return result, _oracle(case, content, q, k, v), live_tokens(spec)


def _readable(case: Case, spec: BatchSpec):
    """bool [N, block_size]: slots that some token of the step sees."""
    readable = np.zeros((num_blocks(case), case.block_size), bool)
    for row in spec.rows:
        oldest = 0
        if case.window is not None:
            oldest = max(0, row.seq_len - row.num_tokens - case.window + 1)
        for position in range(oldest, row.seq_len):
            block, offset = divmod(position, case.block_size)
            readable[row.blocks[block], offset] = True
    return readable


def _oracle(case: Case, content, q, k, v):
    host = make_batch(spec_of(case))
    arrays = unpack(host.bucket, host.ints, host.floats)
    heads = (content.shape[0], content.shape[2], -1, case.dim)
    cache = content.transpose(0, 2, 1, 3, 4).reshape(heads)
    k, v, q = (x.double().numpy() for x in (k, v, q))
    cache = ORACLE["kv_append"](cache.copy(), k, v, arrays)
    return ORACLE["attention"](q, cache, arrays, case.params)
