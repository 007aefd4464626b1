"""The compile gate bites: each planted fault is found, and named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from leadframe_tpu.compile_check.cases import decoder_case, head_case, kernel_case
from leadframe_tpu.compile_check.check import check_step
from leadframe_tpu.compile_check.environment import DEFAULT_TARGETS, has_compiler
from leadframe_tpu.compile_check.targets import open_target

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(not has_compiler(), reason="needs libtpu: lowering finds none of these"),
]


@pytest.fixture(scope="module")
def v5e():
    return open_target(DEFAULT_TARGETS[0])


@pytest.fixture(scope="module")
def sound():
    return kernel_case((64,), "decode")


def plant(case, fault):
    """Wraps a case's step in a faulty one: `fault(step, weights, kv, arrays)`."""

    def build(ops):
        step = case.build(ops)
        return lambda weights, kv_d, arrays: fault(step, weights, kv_d, arrays)

    return replace(case, build=build)


def problems(case, target, ranks=1):
    return "\n".join(check_step(case, target, ranks).problems)


def test_the_sound_step_passes(sound, v5e):
    assert problems(sound, v5e) == ""


def test_a_copy_of_the_cache(sound, v5e):
    def fault(step, weights, kv_d, arrays):
        moved = jnp.roll(kv_d[0].data, 1, axis=0)
        return step(weights, [kv_d[0].with_data(moved)], arrays)

    assert "as large as a layer's cache" in problems(plant(sound, fault), v5e)


def test_head_dim_64_without_fused_lanes(sound, v5e):
    """What happens to the usual layout: XLA stores it its own way and copies it for the kernel."""

    def fault(step, weights, kv_d, arrays):
        split = kv_d[0].data.reshape(-1, 2, 32, 2, 64)
        both = jax.lax.optimization_barrier(split.transpose(3, 0, 1, 2, 4))
        fused = both.transpose(1, 2, 3, 0, 4).reshape(kv_d[0].data.shape)
        return step(weights, [kv_d[0].with_data(fused)], arrays)

    found = problems(plant(sound, fault), v5e)
    assert "as large as a layer's cache" in found
    assert "bytes of scratch" in found


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_cache_that_cannot_be_donated(sound, v5e):
    def fault(step, weights, kv_d, arrays):
        outputs, kv = step(weights, kv_d, arrays)
        return outputs, [kv[0].with_data(kv[0].data[:-1])]

    assert "bytes are donated" in problems(plant(sound, fault), v5e)


def test_a_missing_kernel(sound, v5e):
    def fault(step, weights, kv_d, arrays):
        return {"out": weights["64.q"] * 2}, kv_d

    found = problems(plant(sound, fault), v5e)
    assert "kernel 'paged_attention' is called 0 times" in found
    assert "kernel 'kv_append' is called 0 times" in found


def test_a_step_that_does_not_fit(sound, v5e):
    small = replace(v5e, chip=replace(v5e.chip, hbm_bytes=1 << 28))
    assert "the chip has 268,435,456" in problems(sound, small)


def test_a_table_stored_by_columns(v5e):
    case = decoder_case("smollm2-135m", "decode", layers=1)
    table = replace(case.weights["embed"], role="linear")
    case = replace(case, weights={**case.weights, "embed": table})
    assert "copy of a whole weight (49152, 576)" in problems(case, v5e)


def test_ranks_that_forget_to_add_up(v5e):
    case = decoder_case("gemma-3-1b", "decode", layers=1)
    sound_build = case.build

    def build(ops):
        ops.all_reduce = lambda x: x
        return sound_build(ops)

    assert "sums over the ranks" in problems(replace(case, build=build), v5e, 4)


def test_ranks_that_keep_their_logits_to_themselves(v5e):
    case = head_case(decoder_case("gemma-3-1b", "decode", layers=1), "greedy")
    sound_build = case.build

    def build(ops):
        ops.all_gather = lambda x: jnp.concatenate([x] * 4, axis=-1)
        return sound_build(ops)

    assert "0 gathers over the ranks" in problems(replace(case, build=build), v5e, 4)


def _kernel_fault(body, scratch):
    """A further kernel in the step that no chip can run."""

    def fault(step, weights, kv_d, arrays):
        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        x = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=0,
                grid=(1,),
                in_specs=[in_hbm],
                out_specs=in_hbm,
                scratch_shapes=scratch,
            ),
            out_shape=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        )(jnp.zeros((64, 128), jnp.bfloat16) + weights["64.q"][:1, 0, :1])
        outputs, kv = step(weights, kv_d, arrays)
        return outputs | {"x": x}, kv

    return fault


def _copy_rows(first, count):
    def body(x, out, buffer, done):
        rows = pltpu.make_async_copy(x.at[pl.ds(first, count)], buffer.at[pl.ds(0, count)], done)
        rows.start()
        rows.wait()
        back = pltpu.make_async_copy(buffer.at[pl.ds(0, count)], out.at[pl.ds(0, count)], done)
        back.start()
        back.wait()

    return body


ILLEGAL = {
    "a copy that starts inside a tile": (3, [pltpu.VMEM((64, 128), jnp.bfloat16)], "Mosaic"),
    "more on-chip memory than there is": (0, [pltpu.VMEM((2**20, 128), jnp.bfloat16)], "vmem"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_kernel_that_no_chip_can_run(sound, v5e, name):
    first, scratch, word = ILLEGAL[name]
    fault = _kernel_fault(_copy_rows(first, 8), [*scratch, pltpu.SemaphoreType.DMA(())])
    assert word in problems(plant(sound, fault), v5e)
