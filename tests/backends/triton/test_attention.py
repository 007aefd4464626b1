"""The attention kernels in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leadframe.platform.capabilities import AttnParams

pytestmark = pytest.mark.triton_interp

PLAIN = AttnParams.of(0.125)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
LAYOUTS = {
    "decodes": {"decodes": (1, 15, 16, 17, 70)},
    "chunks": {"chunks": ((1, 1), (9, 9), (5, 37), (20, 64))},
    "mixed-padded": {
        "decodes": (33, 7),
        "chunks": ((5, 20), (40, 100)),
        "pad_decodes": 1,
        "pad_chunks": 2,
        "pad_tokens": 19,
    },
}


def attend(context, problem, params):
    from leadframe_triton import attention

    return attention.attention(context, problem.q, problem.kv, problem.arrays, params)


def check(out, problem, exact, tolerance=3e-6):
    live = problem.live
    error = (out[live].double() - exact[live]).abs().max()
    assert error < tolerance, f"error {error:.2e}"
    assert out.isfinite().all(), "padding must be finite"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "params",
    [PLAIN, AttnParams.of(0.125, window=9), AttnParams.of(0.5, softcap=3.0)],
    ids=["plain", "window", "softcap"],
)
def test_results_match_the_oracle(context, problems, dtype, layout, params):
    problem = problems.make(**LAYOUTS[layout], dtype=dtype)
    check(
        attend(context, problem, params),
        problem,
        problems.oracle(problem, params),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize(("heads", "dim"), [((1, 3), 80), ((2, 4), 96), ((1, 20), 128), ((1, 1), 256), ((2, 2), 8)])  # fmt: skip  # noqa: E501
def test_head_groups_and_dims(context, problems, heads, dim):
    """Groups that are no power of two or larger than a tile; dims that a tile must pad."""
    problem = problems.make(decodes=(18,), chunks=((7, 40),), heads=heads, dim=dim)
    check(attend(context, problem, PLAIN), problem, problems.oracle(problem, PLAIN))


def test_window_and_softcap_together(context, problems):
    params = AttnParams.of(0.3, window=17, softcap=2.0)
    problem = problems.make(decodes=(50,), chunks=((6, 50),))
    check(attend(context, problem, params), problem, problems.oracle(problem, params))


@pytest.mark.parametrize("window", [None, 20])
def test_one_launch_serves_a_whole_mix(context, problems, window):
    from leadframe_triton import attention

    params = AttnParams.of(0.125, window=window)
    problem = problems.make(**LAYOUTS["mixed-padded"])
    out = torch.full_like(problem.q, float("nan"))
    attention.ragged_attention(context, out, problem.q, problem.kv, problem.arrays, params)
    check(out, problem, problems.oracle(problem, params))


@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_block_sizes_around_the_tile(context, problems, block_size):
    problem = problems.make(decodes=(37,), chunks=((5, 40),), block_size=block_size)
    check(attend(context, problem, PLAIN), problem, problems.oracle(problem, PLAIN))


def test_infinities_in_unread_slots_do_not_leak(context, problems):
    params = AttnParams.of(0.125, window=5)
    problem = problems.make(decodes=(30,), chunks=((4, 30),), fill=float("inf"))
    # inside the row, before every window: freed blocks may hold anything
    blocks = problem.arrays.block_table[:, 0].long()
    problem.kv[:, blocks] = float("nan")
    check(attend(context, problem, params), problem, problems.oracle(problem, params))


@pytest.mark.parametrize("window", [None, 50])
def test_split_decode_adds_up(context, problems, window):
    """Contexts cut into several splits, in use by some rows and not by others."""
    params = AttnParams.of(0.125, window=window)
    problem = problems.make(decodes=(200, 33, 1), pad_decodes=1, heads=(1, 2))
    split = replace(context, split_tokens=32)
    check(attend(split, problem, params), problem, problems.oracle(problem, params))


def test_more_splits_than_are_added_up_at_once(context, problems):
    problem = problems.make(decodes=(600,), heads=(1, 1), dim=16)
    # the last key is the largest: every partial before it must be scaled down
    block = problem.arrays.block_table[0, 599 // 16]
    problem.kv[0, block, 599 % 16] = problem.q[0] * 4
    split = replace(context, split_tokens=32)
    check(attend(split, problem, PLAIN), problem, problems.oracle(problem, PLAIN))


def test_idle_cores_split_long_contexts(context):
    from leadframe_triton.attention import split_of

    busy, idle = replace(context, num_cores=132), replace(context, num_cores=132)
    assert split_of(busy, 256, 4096, 64) == (1, 256)
    splits, size = split_of(idle, 8, 100_000, 64)
    assert splits > 8
    assert size % 64 == 0
    assert split_of(idle, 8, 300, 64)[0] == 2, "no split of less than the minimum"


@pytest.mark.parametrize(("programs", "splits"), [(8, 33), (32, 8), (64, 4), (128, 2), (136, 5), (200, 5), (256, 1)])  # fmt: skip  # noqa: E501
def test_splits_fill_whole_waves(context, programs, splits):
    """264 places on 132 cores: 9 splits of 32 programs would leave 24 for a wave of their own."""
    from leadframe_triton.attention import split_of

    cores = replace(context, num_cores=132)
    assert split_of(cores, programs, 16_000, 64)[0] == splits


def test_no_program_takes_a_long_row_alone(context):
    """Among 64 rows of which one is long, the others keep the device busy for a moment only."""
    from leadframe_triton.attention import split_of

    cores = replace(context, num_cores=132)
    assert split_of(cores, 512, 131_072, 64)[0] == 8
    assert split_of(cores, 512, 16_384, 64)[0] == 1


def test_fixed_splits_ignore_the_batch(context):
    from leadframe_triton.attention import split_of

    fixed = replace(context, num_cores=132, split_tokens=500)
    sizes = {split_of(fixed, programs, 4096, 64)[1] for programs in (1, 8, 1000)}
    assert sizes == {512}
    assert split_of(fixed, 8, 4096, 64)[0] == 8


@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_row_has_the_same_bits_alone(context, problems, row):
    """Batch-invariant mode: decodes with fixed splits, and chunks, alone and among others."""
    fixed = replace(context, split_tokens=64)
    narrow = 4 if row == 1 else 12  # a bucket of one split must give the bits of one of several
    shape = {"decodes": (150, 40), "chunks": ((7, 60), (20, 33)), "heads": (1, 2)}
    batch = problems.make(**shape)
    start, (count, ctx) = int(batch.arrays.query_start[row]), batch.rows[row]
    tokens = slice(start, start + count)
    single = {"decodes": (ctx,)} if row < 2 else {"chunks": ((count, ctx),)}
    alone = problems.make(**single, heads=(1, 2), width=narrow)
    alone.q[:] = batch.q[tokens]
    alone.kv = batch.kv
    needed = -(-ctx // 16)
    alone.arrays.block_table[0, :needed] = batch.arrays.block_table[row, :needed]
    together = attend(fixed, batch, PLAIN)[tokens]
    assert torch.equal(attend(fixed, alone, PLAIN), together)


def test_queries_may_be_part_of_a_wider_tensor(context, problems):
    problem = problems.make(decodes=(20,), chunks=((5, 20),))
    wide = torch.cat([problem.q, torch.full_like(problem.q, 9.0)], dim=1)
    exact = problems.oracle(problem, PLAIN)
    problem.q = wide[:, : problem.q.shape[1]]
    check(attend(context, problem, PLAIN), problem, exact)


def test_an_8_bit_cache_is_read_as_it_is(context, problems):
    problem = problems.make(
        decodes=(20,),
        chunks=((5, 20),),
        dtype=torch.float16,
        kv_dtype=torch.float8_e4m3fn,
        fill=0.0,
    )
    exact = problems.oracle(replace(problem, kv=problem.kv.float()), PLAIN)
    check(attend(context, problem, PLAIN), problem, exact, 3e-3)
