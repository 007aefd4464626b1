"""Kernels compiled for chips that are not here; and proof that the gate bites."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.triton_aot

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1100")


@pytest.fixture(scope="module")
def toolbox():
    """The modules of the compile check; importing them imports Triton."""
    from types import SimpleNamespace

    from leadframe_triton import tiles
    from leadframe_triton.arch import ARCHS
    from leadframe_triton.compile_check import cases, driver, gate, resources, run

    return SimpleNamespace(
        archs=ARCHS,
        cases=cases,
        driver=driver,
        gate=gate,
        resources=resources,
        run=run,
        tiles=tiles,
    )


def attention_case(toolbox, kind, dim, tile, dtype="bfloat16"):
    cases = toolbox.cases
    return cases._attention(kind, dim, dtype, tile, cases._PLAIN, dtype, True)


def problems_of(toolbox, target, case):
    rows = toolbox.run.check(toolbox.archs[target], [case])
    return [problem for row in rows for problem in row.problems]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("target", TARGETS)
def test_default_tiles_meet_the_limits(toolbox, target):
    """One case of each kind; `leadframe compile-check` runs the whole matrix."""
    arch = toolbox.archs[target]
    wanted = [
        attention_case(toolbox, kind, 128, toolbox.tiles.tiles_for(arch, kind, 128, 2)[0])
        for kind in ("ragged", "decode")
    ]
    chosen = ("kv_append bfloat16", "add_rms_norm bfloat16", "rope bfloat16 D128")
    wanted += [case for case in toolbox.cases.cases_for(arch) if str(case).startswith(chosen)]
    rows = list(toolbox.run.check(arch, wanted))
    assert {row.kernel for row in rows} == {
        "ragged_attention",
        "decode_attention",
        "combine_splits",
        "kv_append",
        "rms_norm",
        "rope",
    }
    assert [row for row in rows if row.problems] == []
    for row in rows:
        assert row.registers > 0
        if row.kernel in ("ragged_attention", "decode_attention"):
            assert row.shared_bytes > 0
            assert row.tensor_cores


@pytest.fixture(scope="module")
def main_loop(toolbox):
    """The loop over unmasked keys of a default tile, as Triton's last IR before LLVM's has it."""

    def read(target, kind, **settings):
        arch = toolbox.archs[target]
        tile = toolbox.tiles.tiles_for(arch, kind, 128, 2)[0]
        cases = toolbox.cases
        case = cases._attention(
            kind, 128, "bfloat16", tile, cases._PLAIN, "bfloat16", True, **settings
        )
        with toolbox.driver.compile_only(arch) as recorder:
            case.launch(toolbox.run.LaunchContext(arch), 0)
        text = recorder.take()[0].compiled.asm["ttgir"]
        return text[text.index("scf.for") :].split("scf.yield")[0:2]

    return read


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ragged", "decode"])
def test_a_score_is_multiplied_once(toolbox, main_loop, kind):
    """By the scale and log2(e) together: they are two constants of a launch."""
    arch = toolbox.archs["sm_90"]
    tile = toolbox.tiles.tiles_for(arch, kind, 128, 2)[0]
    body, _ = main_loop("sm_90", kind)
    scores = f"tensor<{tile.block_m}x{tile.block_n}xf32"
    products = [line for line in body.splitlines() if "arith.mulf" in line and scores in line]
    assert len(products) == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ragged", "decode"])
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "gfx942", "gfx950"])
def test_block_tables_are_read_ahead(main_loop, target, kind):
    """K's address comes from the table: a loop that reads both in one turn waits for both."""
    body, results = main_loop(target, kind, num_blocks=1 << 18)
    loads = re.findall(r"%(\w+) = (?:tt\.load|amdg\.buffer_load) .*i32\b", body)
    carried = results.splitlines()[0]
    assert all(f"%{name}," in carried or f"%{name} :" in carried for name in loads)
    assert loads or re.search(r"async_copy_global_to_local .*<i32>", body)


@pytest.mark.timeout(240)
def test_amds_code_for_large_caches_is_checked(toolbox):
    """Below 2 GiB a tensor is addressed by 32-bit offsets, above it is not: other code."""
    from leadframe_triton.compile_check.cases import cases_for

    for matrix in ("standard", "full"):
        found = [c for c in cases_for(toolbox.archs["gfx942"], matrix) if "kv:large" in str(c)]
        assert {c.kernel for c in found} == {"ragged_attention", "decode_attention"}
    widest = [case for case in found if case.kernel == "ragged_attention" and "D256" in str(case)]
    rows = list(toolbox.run.check(toolbox.archs["gfx942"], widest[:1]))
    assert [row.problems for row in rows] == [()] * len(rows)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dim", [64, 256])
def test_tiles_of_a_chip_that_ci_does_not_print(toolbox, dim):
    """The family of workstations and of inference cards: less shared memory, 64 K registers."""
    tiles = toolbox.tiles.tiles_for(toolbox.archs["sm_89"], "ragged", dim, 2)
    for tile in tiles:
        assert problems_of(toolbox, "sm_89", attention_case(toolbox, "ragged", dim, tile)) == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("target", ["sm_80", "gfx1100"])
def test_a_tile_that_spills_is_caught(toolbox, target):
    case = attention_case(toolbox, "ragged", 128, toolbox.tiles.Tile(128, 32, 4, 1))
    (problem,) = problems_of(toolbox, target, case)
    assert problem.startswith("spills ")


def test_a_tile_that_exceeds_shared_memory_is_caught(toolbox):
    case = attention_case(toolbox, "decode", 256, toolbox.tiles.Tile(16, 256, 8, 3))
    (*_, problem) = problems_of(toolbox, "sm_80", case)
    assert "shared memory, sm_80 has 166,912" in problem


def test_a_lost_matrix_instruction_is_caught(toolbox):
    case = attention_case(toolbox, "decode", 64, toolbox.tiles.Tile(4, 32, 4, 1))
    assert "no matrix instruction" in problems_of(toolbox, "gfx942", case)[0]


def test_a_kernel_that_does_not_compile_is_a_row(toolbox):
    case = attention_case(toolbox, "decode", 64, toolbox.tiles.Tile(16, 8, 4, 1))
    (problem,) = problems_of(toolbox, "sm_90", case)
    assert problem.startswith("does not compile")


def test_a_kernel_that_is_compiled_again_for_other_lengths_is_caught(toolbox):
    good = next(
        c for c in toolbox.cases.cases_for(toolbox.archs["sm_90"]) if c.kernel == "silu_mul"
    )

    def launch(context, variant):
        from leadframe_triton import layers

        width = (64, 80)[variant]
        x = toolbox.cases._empty(4, width, dtype="bfloat16")
        layers.silu_mul(context, x, x)

    bad = toolbox.cases.Case("silu_mul", "planted", launch)
    assert problems_of(toolbox, "sm_90", good) == []
    assert (
        "compiled again for other lengths: gate_mul_kernel" in problems_of(toolbox, "sm_90", bad)[0]
    )


def test_launches_do_not_run_and_leave_triton_as_it_was(toolbox):
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, driver._active
    case = next(c for c in toolbox.cases.cases_for(toolbox.archs["sm_90"]) if c.kernel == "kv_copy")
    with toolbox.driver.compile_only(toolbox.archs["sm_90"]) as recorder:
        case.launch(toolbox.run.LaunchContext(toolbox.archs["sm_90"]), 0)
    (launch,) = recorder.take()
    assert launch.compiled.asm["cubin"][:4] == b"\x7fELF"
    assert (JITFunction.run, driver._active) == before


@pytest.mark.parametrize(("name", "target"), [("cuda", "sm_90"), ("rocm", "gfx942")])
def test_the_command_prints_the_rows(capsys, monkeypatch, name, target):
    from leadframe.cli.main import main

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # workers compile whatever the environment says
    status = main(["compile-check", name, "--target", target, "--match", "kv_copy", "--jobs", "2", "--json"])  # fmt: skip  # noqa: E501
    rows = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {row["target"] for row in rows} == {target}
    assert len(rows) == 3
    keys = {"kernel", "config", "target", "registers", "spills", "shared_bytes", "tensor_cores"}
    assert all(keys <= row.keys() for row in rows)


def test_the_command_fails_when_nothing_matches(capsys):
    from leadframe.cli.main import main

    assert main(["compile-check", "cuda", "--target", "sm_90", "--match", "no such kernel"]) == 2
    output = capsys.readouterr()
    assert "--match 'no such kernel': no kernel or configuration of sm_90" in output.err
    assert "compiled" not in output.out
