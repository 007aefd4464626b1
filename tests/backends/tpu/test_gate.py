"""The rules of the compile gate, on a few lines of a program."""

from dataclasses import replace

import pytest

from leadframe_tpu.compile_check.check import Cost, Verdict
from leadframe_tpu.compile_check.gate import Expectation, lowering_problems, problems_of
from leadframe_tpu.compile_check.report import as_json, format_matrix
from leadframe_tpu.program import ProgramMemory

CACHE = "bf16[64,32,256]{2,1,0:T(8,128)(2,1)}"


def kernel(name):
    where = f'metadata={{op_name="jit(run)/{name}/pallas_call"}}'
    return f'custom-call(%x), custom_call_target="tpu_custom_call", {where}'


SOUND = [
    f"%kv.1 = {CACHE} parameter(3)",
    f"%append.1 = {CACHE} {kernel('kv_append')}",
    f"%attend.1 = f32[8,4,128]{{2,1,0}} {kernel('paged_attention')}",
    f"ROOT %tuple = (s32[8]{{0}}, {CACHE}) tuple(%t, %append.1)",
]
BYTES = 64 * 32 * 256 * 2
MEMORY = ProgramMemory(1 << 20, scratch=1 << 10, outputs=64, arguments=1 << 24, donated=BYTES)
WANTED = Expectation(
    kernels={"kv_append": 1, "paged_attention": 1},
    cache_dtype="bf16",
    cache_elements=(64 * 32 * 256,),
    cache_bytes=BYTES,
    hbm_bytes=1 << 30,
)


def problems(*extra, memory=MEMORY, wanted=WANTED, lines=SOUND):
    return problems_of("\n".join([*lines, *extra]), memory, wanted)


def test_a_sound_program_has_no_problem():
    assert problems() == []


COPIES = {
    f"%copy.1 = {CACHE} copy(%kv.1)": "1 copy of",
    f"ROOT %copy.1 = {CACHE} copy(%kv.1)": "1 copy of",
    "%t.1 = bf16[32,64,256]{2,1,0} transpose(%kv.1)": "1 transpose of",
    "%r.1 = bf16[2048,256]{1,0} reshape(%kv.1)": "1 reshape of",
    f"%s.1 = ({CACHE}, {CACHE}, u32[]{{:S(2)}}) copy-start(%kv.1)": "1 copy-start of",
    f'%c.1 = {CACHE} custom-call(%kv.1), custom_call_target="Other"': "1 custom-call of",
    f"%f.1 = {CACHE} fusion(%kv.1), kind=kLoop": "1 fusion of",
}


@pytest.mark.parametrize("line", COPIES)
def test_whatever_makes_a_second_cache_is_found(line):
    assert any(COPIES[line] in problem for problem in problems(line))


@pytest.mark.parametrize(
    "line",
    [
        "%f.1 = f32[64,32,256]{2,1,0} fusion(%q)",  # another type
        "%f.1 = bf16[64,32,128]{2,1,0} fusion(%q)",  # another size
        f"%b.1 = {CACHE} bitcast(%kv.1)",
        f"%g.1 = {CACHE} get-tuple-element(%w), index=1",
    ],
)
def test_other_instructions_are_let_through(line):
    assert problems(line) == []


def test_copies_of_weights_are_found_but_not_fetches_on_chip():
    line = "%c.1 = bf16[512,4096]{{1,0:T(8,128)(2,1){}}} copy(%{})"
    weight = "weights__embed__.1"
    assert problems(line.format("", weight)) == ["copy of a whole weight (512, 4096)"]
    assert problems(line.format("S(1)", weight)) == []
    stored = "%weights__embed__.1 = bf16[512,4096]{{{}:T(8,128)}} parameter(0)"
    assert problems(stored.format("1,0"), line.format("S(1)", weight)) == []
    assert len(problems(stored.format("0,1"), line.format("S(1)", weight))) == 1  # turned round
    assert problems(line.format("", "fusion.7")) == []  # an activation
    assert problems(line.replace("4096", "8").format("", weight)) == []  # costs nothing


def test_a_missing_kernel_is_named():
    assert problems(lines=SOUND[:2]) == ["kernel 'paged_attention' is called 0 times, not 1"]


MEMORIES = {
    "bytes are donated": {"donated": BYTES - 2},
    "bytes of scratch": {"scratch": BYTES // 2 + 1},
    "the chip has": {"arguments": 1 << 30},
}


@pytest.mark.parametrize("text", MEMORIES)
def test_memory(text):
    found = problems(memory=replace(MEMORY, **MEMORIES[text]))
    assert len(found) == 1
    assert text in found[0]


def test_sums_over_ranks_are_counted():
    wanted = replace(WANTED, all_reduces=2)
    line = "%r.{} = f32[8]{{0}} all-reduce{}(%x)"
    assert problems(line.format(1, ""), line.format(2, "-start"), wanted=wanted) == []
    assert problems(line.format(1, ""), wanted=wanted) == ["1 sums over the ranks; there must be 2"]


def test_gathers_over_ranks_are_counted():
    wanted = replace(WANTED, all_gathers=1)
    assert problems("%g.1 = f32[8]{0} all-gather-start(%x)", wanted=wanted) == []
    assert problems(wanted=wanted) == ["0 gathers over the ranks; there must be 1"]


def test_a_head_has_neither_cache_nor_kernels():
    wanted = replace(WANTED, kernels={}, has_cache=False)
    assert problems(lines=(), memory=replace(MEMORY, donated=0), wanted=wanted) == []
    assert len(problems(lines=(), wanted=wanted)) == 1  # it donates something
    assert lowering_problems("", 0) == []


def test_lowering_checks_what_it_can():
    kernels = 'tpu_custom_call kernel_name = "kv_append" kernel_name = "paged_attention"'
    assert lowering_problems(kernels + " tf.aliasing_output", 1) == []
    assert lowering_problems(kernels, 1) == ["0 arrays are donated; there are 1 layers"]
    assert len(lowering_problems("", 1)) == 4


def test_the_matrix_says_what_is_wrong_and_how_strong_it_is():
    good = Verdict("a", "v5e:2x2", 1, "compiled", (), 2.0, MEMORY, Cost(2e9, 3e9, 0.004))
    bad = replace(good, case="b", problems=("1 copy of an array",))
    absent = Verdict("c", "v5e:2x2", 4, "not applicable", ("9 parts",))
    text = format_matrix([good, bad, absent])
    assert "WRONG" in text
    assert "    1 copy of an array" in text
    assert "2 of 3 as they must be" in text
    assert "WEAKER" not in text
    data = as_json([good, bad])
    assert data["evidence"] == "compiled-only"
    assert data["steps"][0]["memory"]["donated"] == BYTES
    lowered = Verdict("a", "any", 1, "lowered")
    assert "WEAKER" in format_matrix([lowered])
    assert as_json([good, lowered])["evidence"] == "lowered-only"
