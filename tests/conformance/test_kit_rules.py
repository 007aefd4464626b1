"""The kit's own rules: notes, tiers, reports, the command line."""

import copy
import json
import re
import subprocess
import sys

import pytest

from leadframe.conformance import main
from leadframe.conformance.case import Case, ConformanceFailure, in_tier, matches
from leadframe.conformance.execute import execute
from leadframe.conformance.groups import all_cases
from leadframe.conformance.kit import Kit
from leadframe.conformance.pytest_plugin import first_use
from leadframe.conformance.report import build_report, digest, summary, verify
from leadframe.platform import ConformanceNotes, guard
from leadframe.platform.reference.backend import ReferenceBackend

NOTES = ConformanceNotes(
    unsupported={"B.x[unsupported]": "no such unit"},
    expected_failures={"B.x[expected]": "being mended", "B.x[core]": "hm"},
)


ONE_RANK = "tensor_parallel is 1: there is no room here for a second rank"


def _fails(kit):
    raise ConformanceFailure("wrong")


def _passes(kit):
    pass


@pytest.fixture
def kit():
    return Kit(open=lambda: guard(ReferenceBackend()), device="reference", notes=NOTES)


@pytest.mark.parametrize(
    ("case", "outcome", "reason"),
    [
        (Case("B.x[plain]", _passes), "passed", ""),
        (Case("B.x[plain]", _fails), "failed", "wrong"),
        (Case("B.x[plain]", _fails, "full", lambda kit: "has none"), "not claimed", "has none"),
        (Case("B.x[unsupported]", _passes, "full"), "failed", "capabilities claim it"),
        (Case("B.x[expected]", _fails, "full"), "expected failure", "being mended: wrong"),
        (Case("B.x[expected]", _passes, "full"), "failed", "remove the note"),
        (Case("B.x[core]", _fails, "core"), "failed", "core tier cannot"),
        (Case("B.x[bug]", lambda kit: 1 / 0), "failed", "ZeroDivisionError"),
    ],
)
def test_outcomes(kit, case, outcome, reason):
    result = execute(kit, case)
    assert result.outcome == outcome
    assert reason in result.reason
    if outcome == "failed":
        assert result.rerun.startswith("leadframe conformance reference --tier ")


def test_ids_are_unique_and_every_group_is_there():
    ids = [case.id for case in all_cases()]
    assert len(ids) == len(set(ids))
    assert {case_id[0] for case_id in ids} == set("ABCDEFGHIJ")
    assert all(re.fullmatch(r"[A-J]\.[\w-]+\[[\w.-]+\]", case_id) for case_id in ids)


def test_tiers_contain_the_smaller_ones():
    core, full, perf = (in_tier(all_cases(), tier) for tier in ("core", "full", "perf"))
    assert {c.id for c in core} < {c.id for c in full} < {c.id for c in perf}


@pytest.mark.parametrize("pattern", ["B.attention[mixed]", "B.attention", "B.*mixed]", "*"])
def test_patterns(pattern):
    assert matches("B.attention[mixed]", pattern)


def test_a_case_is_no_glob():
    assert not matches("B.attentionm", "B.attention[mixed]")


@pytest.fixture(scope="module")
def report():
    kit = Kit(open=lambda: guard(ReferenceBackend()), device="reference")
    cases = [case for case in in_tier(all_cases(), "core") if case.group in "IJ"]
    return build_report(kit, [execute(kit, case) for case in cases], "core", 1.0)


def _resigned(report, **changes):
    changed = {**copy.deepcopy(report), **changes}
    changed["summary"] = summary(changed["results"])
    changed["digest"] = digest(changed)
    return changed


def test_a_report_obeys_its_rules(report):
    assert verify(report) == []
    assert report["verdict"] == "partial"
    assert report["evidence"] == "hardware"
    assert json.loads(json.dumps(report)) == report


def _with_result(report, index, **changes):
    results = copy.deepcopy(report["results"])
    results[index].update(changes)
    return _resigned(report, results=results)


def _without_ranks(report, **claims):
    skipped = {"id": "B.ranks[embed]", "outcome": "not claimed", "reason": ONE_RANK}
    results = [*report["results"], {**report["results"][0], **skipped}]
    caps = {**report["capabilities"], **claims}
    return _resigned(report, results=results, capabilities=caps)


def test_what_verify_finds(report):
    assert verify(_without_ranks(report)) == []
    first = report["results"][0]["id"]
    broken = {
        "no digest": ({**report, "seed": 7}, "digest"),
        "schema": ({**report, "schema": 9}, "schema"),
        "verdict": (_resigned(report, verdict="conformant"), "verdict"),
        "skipped core": (
            _with_result(report, 0, outcome="not claimed", reason="x"),
            "skipped by no capability",
        ),
        "expected core": (
            _with_result(report, 0, outcome="expected failure", reason="x"),
            "cannot be expected",
        ),
        "no reason": (_with_result(report, 0, outcome="failed"), f"{first}: failed without"),
        "skipped ranks": (
            _without_ranks(report, tensor_parallel=2, rank_processes=True),
            "no room here for a second rank, but the capabilities say 2",
        ),
        "unknown case": (_with_result(report, 0, id="B.made-up[x]"), "no case"),
        "twice": (
            _resigned(report, results=[*report["results"], report["results"][0]]),
            "appears 2",
        ),
        "evidence": (
            _resigned(report, capabilities={**report["capabilities"], "simulated": "simulated"}),
            "'hardware'",
        ),
    }
    for name, (changed, text) in broken.items():
        assert any(text in problem for problem in verify(changed)), (name, verify(changed))


def test_verify_on_the_command_line(report, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report))
    assert main(["verify", str(path)]) == 1  # it is partial
    path.write_text("{")
    assert main(["verify", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def _conformance(*arguments):
    command = [
        sys.executable,
        "-c",
        "from leadframe.conformance import main; raise SystemExit(main())",
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, check=False
    )


def test_a_platform_without_its_device_is_proved_on_its_interpreter_and_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor does a test machine's GPU count
    path = tmp_path / "out.json"
    done = _conformance("cuda", "--case", "A.hooks", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("device 'cuda' (--device) is not present")
    assert second == "so the kit runs on cuda:interpreter"
    assert "cuda:interpreter: core tier partial; evidence: interpreter (" in done.stdout
    report = json.loads(path.read_text())
    assert (report["device"], report["evidence"]) == ("cuda:interpreter", "interpreter")


def test_cases_are_chosen_within_the_tier(tmp_path):
    path = tmp_path / "out.json"
    done = _conformance("reference", "--case", "B.layer", "--report", str(path))
    assert done.returncode == 0, done.stdout
    assert {result["tier"] for result in json.loads(path.read_text())["results"]} == {"core"}
    done = _conformance("reference", "--case", "H.device")
    assert done.returncode != 0
    assert "H.device: no such case in this tier; add --tier perf" in done.stderr
    done = _conformance("reference", "--case", "Z.nothing")
    assert "no case matches Z.nothing" in done.stderr


@pytest.mark.parametrize(
    "wrong", ["[]", "null", '{"schema": 1, "results": 5}', '{"results": [{}]}']
)
def test_a_report_of_another_shape_is_told_in_a_line(tmp_path, capsys, wrong):
    path = tmp_path / "out.json"
    path.write_text(
        wrong
        if "results" not in wrong
        else json.dumps(
            {
                "schema": 1,
                "tier": "core",
                "capabilities": {},
                "verdict": "failed",
                **json.loads(wrong),
            }
        )
    )
    assert main(["verify", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("device", ["cuda:0", "xpu"])
def test_an_index_and_a_platform_without_interpreter_are_not_replaced(device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = _conformance(device, "--case", "A.hooks")
    assert done.returncode != 0
    assert f"device '{device}' (--device) is not present" in done.stderr
    assert "so the kit runs on" not in done.stdout


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "device 'cuda' (--device) is not present"),
        ("sim", "--require-hardware: the evidence is 'simulated'"),
    ],
)
def test_hardware_can_be_required(device, says, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = _conformance(device, "--case", "A.hooks", "--require-hardware")
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


def test_a_run_writes_its_three_files(tmp_path):
    path = tmp_path / "out.json"
    done = _conformance(
        "sim", "--case", "J", "--case", "H.device", "--tier", "perf", "--report", str(path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert verify(report) == []
    assert report["evidence"] == "simulated"
    assert report["platform"]["distribution"] == "leadframe-sim"
    page = path.with_suffix(".html").read_text()
    assert "<svg" in page
    assert "J: contract evolution" in page
    assert "<testsuite" in path.with_suffix(".xml").read_text()


def test_a_failure_prints_the_line_that_repeats_it():
    arguments = ("sim", "--case", "B.attention[decode]", "-o", "fail=bug@40")
    done = _conformance(*arguments)
    assert done.returncode == 1
    line = next(text for text in done.stdout.splitlines() if text.startswith("leadframe conf"))
    assert "--case 'B.attention[decode]' --seed 0 -o fail=bug@40" in line


def test_a_device_that_is_not_there_is_one_clear_error():
    done = _conformance("nonesuch")
    assert done.returncode == 21
    assert done.stderr.startswith("leadframe: device 'nonesuch' (--device)")
    assert "no installed distribution provides it" in done.stdout + done.stderr


def test_pytest_runs_the_kit_by_its_package_name():
    command = [sys.executable, "-m", "pytest", "--pyargs", "leadframe.conformance", "-q"]
    command += ["-p", "no:cacheprovider", "--device", "reference", "--case", "J"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_a_case_that_needs_hypothesis_says_so_and_blames_no_backend(kit, monkeypatch):
    (case,) = [case for case in all_cases() if case.id == "C.pool[shrinking]"]
    assert execute(kit, case).outcome == "passed"
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    result = execute(kit, case)
    assert (result.outcome, result.reason.split(";")[1]) == (
        "failed", " run: pip install hypothesis",
    )  # fmt: skip


def test_the_device_is_selected_once():
    script = """
from leadframe.conformance import main, open_kit
select, asked = open_kit.select_device, []
open_kit.select_device = lambda *args: (asked.append(args), select(*args))[1]
code = main(["reference", "--case", "J"])
print("asked", len(asked))
raise SystemExit(code)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "asked 1" in done.stdout


@pytest.mark.parametrize(("group", "comes_first"), [("A", True), ("J", False)])
def test_a_device_for_one_process_is_probed_before_it_is_held(group, comes_first):
    held = []
    args = ("--device", "mutant", "--object", "leadframe_sim.mutants.plugins:good")
    kit = Kit(
        open=lambda: (held.append(bool(kit.probe_report)), ReferenceBackend())[1],
        probe_args=(*args, "--distribution", "leadframe-sim"),
    )
    first_use(kit, [case for case in all_cases() if case.group == group])
    assert held == [comes_first]


def test_what_was_left_out_is_printed_with_its_reason():
    done = _conformance("reference", "--case", "*.ranks[*")
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("not claimed")]
    assert lines == [
        "not claimed, cases left out: 8: tensor_parallel is 1: several devices for one model are "
        "not claimed",
        "not claimed, cases left out: 3: rank_processes is not claimed",
    ]
