"""Appending to and copying in the cache, in Triton's interpreter: exact, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.triton_interp


def append(context, problem, k, v):
    from leadframe_triton import attention

    return attention.kv_append(context, problem.kv, k, v, problem.arrays)


@pytest.mark.parametrize(("heads", "dim"), [((2, 1), 64), ((1, 1), 80), ((3, 1), 8)])
def test_append_writes_each_slot_and_no_other(context, problems, heads, dim):
    problem = problems.make(
        decodes=(17,), chunks=((5, 9),), pad_decodes=1, pad_tokens=3, heads=heads, dim=dim, fill=7.0
    )
    before = problem.kv.clone()
    k = torch.randn(problem.q.shape[0], heads[0], dim)
    handle = append(context, problem, k, k + 1)
    assert handle is problem.kv, "the handle is donated and returned"
    flat, old = handle.flatten(1, 2), before.flatten(1, 2)
    written = problem.arrays.slots.long()
    for token in problem.live:
        assert torch.equal(flat[0, written[token]], k[token])
        assert torch.equal(flat[1, written[token]], k[token] + 1)
    untouched = torch.ones(flat.shape[1], dtype=torch.bool)
    untouched[written] = False
    assert torch.equal(flat[:, untouched], old[:, untouched])


def test_append_takes_slices_of_a_fused_projection(context, problems):
    problem = problems.make(chunks=((5, 9),))
    fused = torch.randn(5, 6, 64)
    append(context, problem, fused[:, 2:4], fused[:, 4:])
    flat = problem.kv.flatten(1, 2)[:, problem.arrays.slots.long()]
    assert torch.equal(flat, torch.stack([fused[:, 2:4], fused[:, 4:]]))


def test_append_converts_to_the_type_of_the_cache(context, problems):
    """Values that 8 bits hold exactly: the interpreter loses the carry when it rounds others."""
    problem = problems.make(
        chunks=((4, 4),), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, fill=0.0
    )
    k = torch.randn(4, 2, 64).to(torch.float8_e4m3fn).half()
    append(context, problem, k, -k)
    flat = problem.kv.view(torch.uint8).flatten(1, 2)[:, problem.arrays.slots.long()]
    stored = flat.view(torch.float8_e4m3fn).half()
    assert torch.equal(stored, torch.stack([k, -k]))


def test_copy_moves_whole_blocks(context):
    from leadframe_triton import attention

    kv = torch.randn(2, 9, 16, 3, 80)
    before = kv.clone()
    source, target = np.array([3, 5], np.int32), np.array([8, 1], np.int32)
    assert attention.kv_copy(context, kv, source, target) is kv
    before[:, target] = before[:, source]
    assert torch.equal(kv, before)


def test_copy_of_nothing_launches_nothing(context):
    from leadframe_triton import attention

    kv = torch.zeros(2, 2, 16, 1, 64)
    empty = np.zeros(0, np.int32)
    assert attention.kv_copy(context, kv, empty, empty) is kv
