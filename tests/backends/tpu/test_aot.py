"""Kernels and full steps compile for real chips, and what comes out is as it must be.

With libtpu these compile ahead of time; without it they are lowered only, which is much weaker,
and each test says so by skipping after that.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from leadframe.models.info import GenerationDefaults
from leadframe.models.model import DecoderModel
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec
from leadframe.platform import Bucket, KVSpec
from leadframe.runner.step import ModelStep
from leadframe_tpu.capabilities import BLOCK_SIZES, HEAD_DIMS
from leadframe_tpu.compile_check.cases import head_case, kernel_case
from leadframe_tpu.compile_check.check import StepCase, check_step
from leadframe_tpu.compile_check.environment import DEFAULT_TARGETS, has_compiler
from leadframe_tpu.compile_check.report import format_matrix
from leadframe_tpu.compile_check.shapes import (
    BLOCK_SIZE,
    BUCKETS,
    KERNEL_BUCKETS,
    SHAPES,
    WAYS,
    KernelStep,
    Weight,
)
from leadframe_tpu.compile_check.targets import lowering_target, open_target
from leadframe_tpu.kernels.work import row_groups
from leadframe_tpu.op_table import make_ops

pytestmark = pytest.mark.tpu_aot


@pytest.fixture(scope="module")
def judge(request):
    """Compiles a case; without libtpu lowers it and skips. Prints the matrix at the end."""
    verdicts = []

    def run(case, target_name, ranks=1):
        target = open_target(target_name) if has_compiler() else lowering_target()
        if ranks > 1 and not target.is_compiled:
            pytest.skip("WEAKER: libtpu is not installed; ranks cannot even be lowered")
        verdict = check_step(case, target, ranks)
        verdicts.append(verdict)
        assert not verdict.problems, verdict.problems
        if not target.is_compiled:
            pytest.skip("WEAKER: libtpu is not installed; the step was lowered, not compiled")
        return verdict

    yield run
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + format_matrix(verdicts))


def model_case(name, step, layers):
    """The layers of a step of the real model file, in the shape of a model."""
    shape = replace(SHAPES[name], layers=layers)
    spec = DecoderSpec(
        architecture=name,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=tuple(LayerSpec(shape.attention(i)) for i in range(layers)),
        ropes=(RopeSpec((1.0,) * (shape.head_dim // 2)),),
        max_position_embeddings=4096,
        norm_eps=1e-5,
    )
    model = DecoderModel(spec, GenerationDefaults())
    weights = {n: Weight(p.shape, p.partition, None, p.role) for n, p in model.parameters.items()}
    weights |= {n: Weight(v.shape, dtype=d) for n, (v, d) in model.constants.items()}
    return StepCase(
        name=f"{name} {step}",
        build=lambda ops: ModelStep(model, ops),
        weights=weights,
        kv=KVSpec(model.info.kv_layers, BLOCK_SIZE, "bfloat16"),
        bucket=BUCKETS[step],
    )


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("step", BUCKETS)
@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_a_full_step_of_llama_3_8b(judge, target, step, ranks):
    layers = 2 if target == DEFAULT_TARGETS[0] else 1
    verdict = judge(model_case("llama-3-8b", step, layers), target, ranks)
    assert verdict.memory.scratch < 64 << 20
    assert verdict.cost.flops > 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_heads_of_llama_3_8b(judge, way, ranks):
    case = head_case(model_case("llama-3-8b", "decode", 1), way)
    verdict = judge(case, DEFAULT_TARGETS[0], ranks)
    rows, table = 64 * 4096 * 2, 128_256 // ranks * 4096 * 2
    assert table + rows <= verdict.memory.arguments < table + 2 * rows + (1 << 16)


def test_a_head_does_not_depend_on_how_many_tokens_there_are(judge):
    case = head_case(model_case("llama-3-8b", "mixed", 1), "greedy")
    many = replace(case, bucket=replace(case.bucket, num_tokens=8192))
    one, other = (judge(c, DEFAULT_TARGETS[0]) for c in (case, many))
    assert one.memory == other.memory


@pytest.mark.parametrize("step", BUCKETS)
@pytest.mark.parametrize("model", sorted(set(SHAPES) - {"llama-3-8b"}))
def test_other_head_dimensions_in_a_full_step(judge, model, step):
    judge(model_case(model, step, 2), DEFAULT_TARGETS[0])


@pytest.mark.parametrize("step", KERNEL_BUCKETS)
@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_the_kernels_at_every_head_dimension(judge, target, step):
    judge(kernel_case(HEAD_DIMS, step), target)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_kernels_at_every_block_size(judge, block_size):
    judge(kernel_case((64, 128), "decode", "bfloat16", block_size), DEFAULT_TARGETS[0])


@pytest.mark.skipif(not has_compiler(), reason="needs libtpu")
def test_candidates_are_sorted_without_their_indices():
    where = jax.sharding.SingleDeviceSharding(open_target(DEFAULT_TARGETS[0]).devices[0])
    rows = {"temperature": "f", "uniform": "f", "min_p": "f", "top_k": "i", "top_p": "f"}
    arrays = [jax.ShapeDtypeStruct((8, 32_000), "f", sharding=where)]
    arrays += [jax.ShapeDtypeStruct((8,), dtype, sharding=where) for dtype in rows.values()]
    sample = make_ops(interpret=False, num_ranks=1)["sample"]
    text = jax.jit(lambda *a: sample(*a, "threshold")).lower(*arrays).compile().as_text()
    sorts = [line for line in text.splitlines() if " sort(" in line]
    assert len(sorts) == 1
    assert "s32" not in sorts[0]


def test_tables_that_take_several_calls_take_one_output(judge):
    bucket = Bucket(2048, 256, 0, num_blocks=4096, num_logits=0, sample="skip")  # 128k tokens
    weights = KernelStep.weights((128,), bucket)
    case = replace(kernel_case((128,), "mixed"), bucket=bucket, weights=weights)
    verdict = judge(case, DEFAULT_TARGETS[0])
    outputs = 4 * 2048 * 8 * 128  # bytes of one
    assert len(row_groups(256, 4096)) == 7
    assert verdict.memory.scratch < 4 * outputs


def test_the_kernels_in_float32(judge):
    judge(kernel_case((64, 128), "mixed", "float32", 8), DEFAULT_TARGETS[0])


@pytest.mark.skipif(not has_compiler(), reason="needs libtpu")
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_that_jax_ships_compiles_at_128_and_not_at_64(dim):
    target = open_target(DEFAULT_TARGETS[0])
    mesh = Mesh(np.array(target.devices[:1]), ("chip",))

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    arrays = (
        struct((64, 8, dim), jnp.bfloat16),
        struct((256, 32, 4, dim), jnp.bfloat16),  # K and V of two heads, interleaved
        struct((16,), jnp.int32),
        struct((16, 64), jnp.int32),
        struct((17,), jnp.int32),
        struct((1,), jnp.int32),
    )
    sizes = {"num_kv_pages_per_block": 8, "num_queries_per_block": 16}
    with jax.set_mesh(mesh):
        if dim == 64:
            with pytest.raises(AssertionError):
                ragged_paged_attention.lower(*arrays, **sizes)
        else:
            compiled = ragged_paged_attention.lower(*arrays, **sizes).compile()
            assert "tpu_custom_call" in compiled.as_text()
