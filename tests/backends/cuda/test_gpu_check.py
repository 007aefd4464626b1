"""The script that proves a GPU: that it survives what goes wrong, and runs end to end dry."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def gpu_check(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check_under_test", BENCH / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(gpu_check, monkeypatch, tmp_path):
    """Runs planted stages; returns the result and the file at the end."""

    def go(seconds=100.0, **stages):
        monkeypatch.setattr(
            gpu_check, "STAGES", {name: (stage, 50.0) for name, stage in stages.items()}
        )
        plan = gpu_check.Plan("cuda", False, tmp_path, time.monotonic() + seconds)
        target = tmp_path / "deep" / "result.json"
        return gpu_check.check(plan, list(stages), target), target

    return go


def test_a_stage_that_raises_costs_its_own_numbers_only(run):
    def broken(plan, limit):
        raise RuntimeError("CUDA error: an illegal memory access")

    result, target = run(first=broken, second=lambda plan, limit: {"speed": 1})
    assert "illegal memory access" in result["stages"]["first"]["error"]
    assert result["stages"]["second"]["speed"] == 1
    assert json.loads(target.read_text()) == result


def test_results_are_on_disk_after_every_stage(run, tmp_path):
    seen = []
    target = tmp_path / "deep" / "result.json"

    def second(plan, limit):
        seen.append(json.loads(target.read_text())["stages"])
        return {}

    run(first=lambda plan, limit: {"speed": 1}, second=second)
    assert seen[0]["first"]["speed"] == 1


def test_a_limit_ends_the_run_and_says_so(run):
    result, _ = run(seconds=0.5, first=lambda plan, limit: {})
    assert result["stages"]["first"]["error"] == "no time left"


def test_a_stage_gets_what_is_left_of_the_time(run):
    limits = []

    def stage(plan, limit):
        limits.append(limit)
        return {}

    run(seconds=10.0, first=stage)
    run(seconds=500.0, first=stage)
    assert limits[0] <= 10.0
    assert limits[1] == 50.0


def test_without_a_device_it_says_so_and_starts_nothing(gpu_check, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--report", str(report)])
    assert gpu_check.main() == 2
    assert "device 'cuda' (--device) is not present" in capsys.readouterr().err
    assert not gpu_check._RUNNING
    assert not report.exists()


def test_the_kit_takes_no_interpreter_in_the_devices_place(gpu_check, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(gpu_check, "_start", lambda command, log: started.append(command))
    for dry_run in (False, True):
        plan = gpu_check.Plan("cuda", dry_run, tmp_path, time.monotonic() + 100)
        gpu_check._start_kit(plan, ("B.",), 0)
    assert ["--require-hardware" in command for command in started] == [True, False]


def test_later_stages_are_compiled_while_the_kit_computes(gpu_check, monkeypatch, tmp_path):
    """And no longer: what looks at memory, or is timed, finds nobody else on the GPU."""
    events = []

    class Process:
        def __init__(self, name):
            self.name, self.returncode = name, 0 if name != "warm engine" else 1

    def start_kit(plan, cases, index):
        events.append(f"start {cases[0]}")
        return Process("kit"), tmp_path / "absent"

    def warm_up(plan, name, *arguments):
        events.append(f"start warm {name}")
        return Process(f"warm {name}")

    def wait(process, seconds):
        events.append(f"end {process.name}")
        return True

    monkeypatch.setattr(gpu_check, "_start_kit", start_kit)
    monkeypatch.setattr(gpu_check, "_start_warm_up", warm_up)
    monkeypatch.setattr(gpu_check, "_wait", wait)
    monkeypatch.setattr(gpu_check, "_merge_kit", lambda out, *rest: None)
    plan = gpu_check.Plan("cuda", False, tmp_path, time.monotonic() + 100)
    out = gpu_check.kit(plan, 50.0)
    alone = events.index("start C.")
    assert events[0] == "start warm roofline"
    assert max(events.index("end warm roofline"), events.index("end warm engine")) < alone
    assert events.count("end warm engine") == 2
    assert out["warm"] == 1, "of three, the two engines failed; nothing else is lost with them"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["roofline", "engine"])
def test_warming_up_measures_nothing(tmp_path, name):
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / f"gpu_{name}.py"), "--warm", "--toy"]
    command += ["--report", str(report), "--device", "cuda:interpreter"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert not report.exists()


def test_timed_requests_outlast_the_timing(monkeypatch):
    """One that ended early would leave a smaller last batch, which the host's gap is taken from."""
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_engine

    added = []

    class Engine:
        num_waiting = 0

        def add_request(self, name, ids, params):
            added.append(params.max_tokens)

        def step(self):
            pass

        def advance(self, deliver):
            pass

        def abort_all(self):
            pass

    bench = gpu_engine.EngineBench.__new__(gpu_engine.EngineBench)
    bench.engine, bench._ids, bench._max_model_len = Engine(), iter(range(9)), 4096
    monkeypatch.setattr(bench, "_all_decode", lambda: True)
    monkeypatch.setattr(bench, "host_gap", lambda seconds: None)
    bench.decode(3, 512, 40)
    assert added == [4096 - 512] * 3


def test_what_it_started_ends_with_it(gpu_check, tmp_path):
    code = (
        "import importlib.util, pathlib, signal, sys, atexit, time\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "import gpu_check\n"
        "atexit.register(gpu_check._end_all)\n"
        "signal.signal(signal.SIGTERM, gpu_check._leave)\n"
        "child = gpu_check._start([sys.executable, '-c', 'import time; time.sleep(100)'],\n"
        "                         pathlib.Path(sys.argv[1]))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(20) != 0
    assert not Path(f"/proc/{child}").exists()


def test_a_script_that_hangs_is_stopped_and_keeps_its_report(gpu_check, monkeypatch, tmp_path):
    script = (
        "import sys, time; path = sys.argv[sys.argv.index('--report') + 1]\n"
        "open(path, 'w').write('{\"copy\": 3}'); time.sleep(60)\n"
    )
    (tmp_path / "gpu_slow.py").write_text(script)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    plan = gpu_check.Plan("cuda", False, tmp_path, time.monotonic() + 100)
    outcome = gpu_check.script("slow")(plan, 5.0)
    assert outcome == {"copy": 3, "error": "stopped after 5 s"}


def test_every_case_of_the_kit_is_run_once(gpu_check):
    from leadframe.conformance.case import in_tier, matches
    from leadframe.conformance.groups import all_cases

    shares = [share for wave in gpu_check.KIT_WAVES for share in wave]
    for case in in_tier(all_cases(), "full"):
        takers = [share for share in shares if any(matches(case.id, part) for part in share)]
        assert len(takers) == 1, (case.id, takers)


def test_goals_are_compared_with_what_was_measured(gpu_check):
    problems = {
        "decode 32x1@4096 H32/8 D128": {"share_of_copy_bandwidth": 0.8},
        "prefill 1x8192@8192 H32/8 D128": {"share_of_matmul_peak": 0.5},
    }
    stages = {
        "roofline": {"problems": problems},
        "engine_1b": {"captured_1": {"host_gap_microseconds": 120.0}, "seconds": 3.0},
        "engine_8b": {"captured_1": {"host_gap_microseconds": 500.0}},
    }
    goals = gpu_check.compare(stages)
    assert [goal["met"] for goal in goals.values()] == [True, False, False]
    assert goals["host_gap_microseconds"]["measured"] == 500.0
    assert gpu_check.compare({}) == {}


def test_the_problems_that_goals_name_are_measured(gpu_check, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_roofline

    names = [problem.name for problem in gpu_roofline.PROBLEMS]
    source = (BENCH / "gpu_check.py").read_text()
    assert "decode 32x1@4096 H32/8 D128" in names
    assert "prefill 1x8192@8192 H32/8 D128" in names
    assert all(f'"{name}"' in source for name in names[:1] + names[6:7])
    decode, prefill = gpu_roofline.PROBLEMS[0], gpu_roofline.Problem(1, 4, 4, 1, 1, 16)
    assert decode.kv_bytes == 32 * 4096 * 8 * 128 * 2 * 2
    assert prefill.operations == 4 * 16 * (1 + 2 + 3 + 4)


class _Graph:
    bytes = 1
    replays = 0

    def replay(self):
        self.replays += 1

    def close(self):
        pass


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_hosts_gap_is_the_step_without_its_recorded_part(monkeypatch, is_recorded):
    """Through the guard that stands before every backend and step."""
    import torch

    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_engine

    from leadframe.platform import Bucket, Capabilities, MemoryInfo, StepBatch, guard
    from leadframe_torch import TorchBackend

    graph = _Graph()

    class Graphs:
        def record(self, function):
            return graph, function()

    class Layer:
        device = torch.device("cpu")
        graphs = Graphs() if is_recorded else None

        def memory(self, held):
            return MemoryInfo(1, 1, 0, 0)

    caps = Capabilities("torch", ("float32",), ("float32",), (16,))
    backend = guard(TorchBackend(Layer(), caps))
    bucket = Bucket(1, 1, 1, 1, 0, "skip")

    class Runner:
        def __init__(self):
            self.backend = backend

        def _step_for(self, bucket):
            return backend.compile(lambda weights, kv, arrays: ({}, kv), bucket, {}, [])

    bench = gpu_engine.EngineBench.__new__(gpu_engine.EngineBench)
    bench._runner, bench._batches = Runner(), [StepBatch(bucket, None, None, 1, 1, 1)]
    gap = bench.host_gap(0.5)
    if is_recorded:
        assert 0.4 < gap < 0.5
        assert graph.replays > 0
    else:
        assert gap is None


@pytest.mark.timeout(280)
def test_a_dry_run_goes_through_every_stage(tmp_path):
    report = tmp_path / "dry.json"
    stages = "facts,roofline,engine_1b"  # the kit has tests of its own
    command = [
        str(BENCH / "gpu_check.sh"),
        "--dry-run",
        "--stages",
        stages,
        "--report",
        str(report),
    ]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    found = json.loads(report.read_text())["stages"]
    assert list(found) == stages.split(",")
    rows = found["roofline"]["problems"].values()
    assert len(rows) == 3
    assert all(row["ours_microseconds"] > 0 for row in rows)
    assert found["engine_1b"]["captured_2"]["tokens_per_second"] > 0
    assert found["engine_1b"]["eager_2"]["step_over_floor"] > 0
