"""The tables of chips and tiles, the claims made from them, and the gate's rules: no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leadframe.errors import Unsupported
from leadframe.platform.capabilities import OpSpec
from leadframe_triton.arch import ARCHS, CHECKED, INTERPRETER, arch_named
from leadframe_triton.capabilities import HEAD_DIMS, capabilities
from leadframe_triton.launch import LaunchContext, TileKey, default_tile
from leadframe_triton.tiles import padded_head_dim, tiles_for


def power_of_two(n):
    return n & (n - 1) == 0


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("kind", ["ragged", "decode"])
def test_every_chip_has_tiles_for_every_head(arch, kind):
    for dim in HEAD_DIMS:
        for element_bytes in (2, 4):
            tiles = tiles_for(arch, kind, dim, element_bytes)
            assert len(set(tiles)) == len(tiles) > 0
            for tile in tiles:
                assert all(map(power_of_two, (tile.block_m, tile.block_n, tile.num_warps)))
                assert tile.block_n >= 16, "a dot over fewer keys has no matrix instruction"
                assert tile.block_m >= 16


def test_head_dims_are_padded_to_what_a_tile_can_be():
    assert [padded_head_dim(d) for d in (8, 16, 64, 80, 96, 128, 200)] == [
        16, 16, 64, 128, 128, 128, 256,
    ]  # fmt: skip


def test_chips_are_found_by_the_names_that_drivers_use():
    assert arch_named("sm_90a") is ARCHS["sm_90"]
    assert arch_named("gfx90a") is ARCHS["gfx90a"]
    assert arch_named("gfx942:sramecc+:xnack-") is ARCHS["gfx942"]
    with pytest.raises(Unsupported, match=r"sm_61.*prepared for sm_80"):
        arch_named("sm_61")


def test_targets_of_every_change_are_known_chips():
    for vendor, names in CHECKED.items():
        assert all(ARCHS[name].vendor == vendor for name in names)


def test_the_default_tile_is_the_first_of_the_table():
    key = TileKey("decode", 128, 4, 2, 16)
    assert default_tile(ARCHS["sm_90"], key) == tiles_for(ARCHS["sm_90"], "decode", 128, 2)[0]


def test_launch_options_are_of_the_vendor():
    hip, cuda = LaunchContext(ARCHS["gfx942"]), LaunchContext(ARCHS["sm_90"])
    assert hip.options(4, 2, 3)["waves_per_eu"] == 3
    assert "waves_per_eu" not in cuda.options(4, 2, 3)
    assert cuda.options()["enable_fp_fusion"] is True
    assert replace(cuda, num_cores=7).cores == 7
    assert cuda.cores == 132


def test_claims_follow_the_chip():
    hopper = capabilities(ARCHS["sm_90"], batch_invariant=True)
    assert hopper.compute_dtypes[0] == "bfloat16"
    assert "float8_e4m3fn" in hopper.kv_dtypes
    assert hopper.graph == "record"
    assert hopper.batch_invariant
    assert hopper.simulated == ""
    assert "float8_e4m3fn" not in capabilities(ARCHS["sm_80"]).kv_dtypes
    assert "float8_e4m3fnuz" in capabilities(ARCHS["gfx942"]).kv_dtypes
    assert capabilities(ARCHS["sm_90"], graph="compile").graph == "compile"


def test_the_interpreter_claims_no_bfloat16_and_no_silicon():
    caps = capabilities(INTERPRETER)
    assert caps.simulated == "interpreter"
    assert "bfloat16" not in caps.compute_dtypes + caps.kv_dtypes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"features": frozenset({"sinks"})}, "have no sinks"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "int4"}, "KV dtype int4"),
        ({"block_size": 48}, "block size 48"),
        ({"head_dim": 100}, "head dim 100"),
        ({"head_dim": 512}, "head dim 512"),
        ({"num_heads": 9, "num_kv_heads": 2}, "do not divide"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(change, reason):
    spec = OpSpec("attention", "bfloat16", "bfloat16", 128, 32, 8, 16, frozenset({"window"}))
    why_not = capabilities(ARCHS["sm_90"]).why_not
    assert why_not(spec) is None
    assert reason in why_not(replace(spec, **change))


class TestGate:
    """The rules, on resources that no compiler had to produce."""

    @pytest.fixture
    def judge(self):
        from leadframe_triton.compile_check.cases import Case
        from leadframe_triton.compile_check.gate import judge
        from leadframe_triton.compile_check.resources import Resources

        def run(target="sm_90", kernel="decode_attention", needs=True, head_dim=128, **changes):
            case = Case("an op", "planted", lambda context, variant: None, needs, head_dim)
            good = Resources(registers=128, spills=0, shared_bytes=1000, tensor_cores="mma.sync")
            return judge(kernel, case, ARCHS[target], replace(good, **changes), 0.0)

        return run

    def test_a_good_kernel_passes(self, judge):
        assert judge().problems == ()
        assert judge(needs=False, tensor_cores="").problems == ()

    def test_one_spilled_byte_fails(self, judge):
        assert judge(spills=1).problems[0].startswith("spills 1 (limit 0)")

    def test_the_last_byte_of_shared_memory_may_be_used(self, judge):
        assert judge(shared_bytes=227 * 1024).problems == ()
        assert "232,448" in judge(shared_bytes=227 * 1024 + 1).problems[0]
        assert judge(target="gfx942", shared_bytes=65537).problems

    def test_a_missing_matrix_instruction_fails(self, judge):
        assert "no matrix instruction" in judge(tensor_cores="").problems[0]
        assert judge(kernel="combine_splits", tensor_cores="").problems == ()

    def test_an_exception_holds_for_its_chip_and_its_limit_only(self, judge):
        accepted = judge(target="gfx1100", head_dim=256, spills=100)
        assert accepted.problems == ()
        assert "RDNA3" in accepted.note
        assert judge(target="gfx1100", head_dim=256, spills=401).problems
        assert judge(target="gfx1100", head_dim=128, spills=100).problems
        assert judge(target="gfx942", head_dim=256, spills=100).problems
