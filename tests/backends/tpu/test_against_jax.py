"""Our attention against the kernels that JAX ships, same inputs.

Theirs take head dimension 128 only; the ahead-of-time tests show that ours takes the others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    kernel as ragged,
)

from leadframe.platform.batch import Bucket, packed_sizes, unpack
from leadframe.platform.capabilities import AttnParams
from leadframe_tpu import attention_ops
from leadframe_tpu.kernels.layout import KVBlocks

BLOCK, HEADS, KV_HEADS, DIM, BLOCKS = 16, 8, 2, 128, 24
SCALE = DIM**-0.5


@pytest.fixture(scope="module")
def pool():
    """K and V, each [blocks, block, kv_heads, D]."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, BLOCKS, BLOCK, KV_HEADS, DIM)).astype(np.float32)


def ours(q, pool, ints, bucket):
    """Our kernel alone: the keys are in the cache already."""
    fused = np.concatenate([pool[0], pool[1]], axis=-1).reshape(BLOCKS, BLOCK, -1)
    params = AttnParams.of(SCALE)

    def attend(q, data, ints):
        plan = attention_ops.plan(unpack(bucket, ints, None), params)
        kv = KVBlocks(data, DIM, KV_HEADS)
        return attention_ops.attention(q, kv, plan, params, interpret=True)

    return np.asarray(jax.jit(attend)(q, fused, ints))


def test_decodes_agree_with_paged_attention(pool):
    lens = np.array([1, 16, 37, 64], np.int32)
    bucket = Bucket(4, 4, 4, 4, 4)
    ints = np.zeros(packed_sizes(bucket)[0], np.int32)
    arrays = unpack(bucket, ints, None)
    arrays.query_start[:] = np.arange(5)
    arrays.seq_lens[:] = lens
    arrays.block_table[:] = np.random.default_rng(1).permutation(BLOCKS)[:16].reshape(4, 4)
    q = np.random.default_rng(2).standard_normal((4, HEADS, DIM)).astype(np.float32)
    by_head = jnp.asarray(pool.transpose(0, 3, 1, 2, 4))  # [2, kv_heads, blocks, block, D]
    with pltpu.force_tpu_interpret_mode():
        theirs = paged_attention(
            q * SCALE, *by_head, lens, arrays.block_table, pages_per_compute_block=2
        )
    np.testing.assert_allclose(ours(q, pool, ints, bucket), theirs, rtol=0, atol=2e-2)


def test_a_ragged_batch_agrees_with_the_reference_of_ragged_paged_attention(pool):
    """JAX's kernel does not run in its own interpreter; its reference in plain JAX does."""
    counts, lens = np.array([1, 1, 20, 7]), np.array([9, 40, 33, 7], np.int32)
    bucket = Bucket(29, 4, 0, 4, 4)
    ints = np.zeros(packed_sizes(bucket)[0], np.int32)
    arrays = unpack(bucket, ints, None)
    arrays.query_start[1:] = np.cumsum(counts)
    arrays.seq_lens[:] = lens
    arrays.block_table[:] = np.random.default_rng(3).permutation(BLOCKS)[:16].reshape(4, 4)
    q = np.random.default_rng(4).standard_normal((29, HEADS, DIM)).astype(np.float32)
    pages = np.stack([pool[0], pool[1]], axis=3).reshape(BLOCKS, BLOCK, 2 * KV_HEADS, DIM)
    theirs = ragged.ref_ragged_paged_attention(
        jnp.asarray(q),
        jnp.asarray(pages),
        jnp.asarray(lens),
        jnp.asarray(arrays.block_table),
        jnp.asarray(arrays.query_start),
        jnp.array([4]),
        sm_scale=SCALE,
    )
    np.testing.assert_allclose(ours(q, pool, ints, bucket), theirs, rtol=0, atol=1e-5)
