"""A third party's first day: plugins built to wheels, in an environment without this repository.

Leadframe and the plugins come from wheels only. What they depend on is linked in from the
environment that runs this test, so that nothing is downloaded.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = ("core", "backends/torch")
PLATFORMS = {"scratch": "examples/scratch", "torchdev": "examples/torch-device"}
LIMITS = {"scratch": 300, "torch-device": 100, "fast-attention": 100}
PUBLIC = ("leadframe.platform", "leadframe.errors", "leadframe.conformance", "leadframe_torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(*command, cwd, timeout=400, check=True):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LEADFRAME_DEVICE")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _build(source, folder):
    """Builds a wheel from a copy, so that the sources stay as they are."""
    copy = folder / "src" / source.name
    skip = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(source, copy, ignore=skip)
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q")
    _run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder / "wheels", copy, cwd=folder)


def _install(folder, python, *wheels):
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    _run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, cwd=folder)


def _link_dependencies(target):
    """Links every installed package but ours: no editable finder reaches this repository."""
    target.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        is_ours = re.match(r"_*(editable_+)?_*leadframe", entry.name)
        if not is_ours and not entry.name.startswith("__editable__") and entry.suffix != ".pth":
            (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A folder with an environment that holds Leadframe and the examples from wheels."""
    folder = tmp_path_factory.mktemp("third-party")
    for source in (*OURS, *PLATFORMS.values()):
        _build(ROOT / source, folder)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env/bin/python"
    _link_dependencies(folder / "links")
    site = next((folder / "env/lib").glob("python*")) / "site-packages"
    (site / "links.pth").write_text(f"{folder / 'links'}\n")
    _install(folder, python, *(folder / "wheels").glob("*.whl"))
    return folder


def _leadframe(folder, *arguments, **options):
    return _run(folder / "env/bin/leadframe", *arguments, cwd=folder, **options)


def test_nothing_comes_from_the_repository(clean):
    script = (
        "import leadframe, leadframe_torch; print(leadframe.__file__, leadframe_torch.__file__)"
    )
    out = _run(clean / "env/bin/python", "-c", script, cwd=clean).stdout
    assert out.count(str(clean / "env")) == 2
    assert str(ROOT) not in out


def test_the_plugins_are_listed(clean):
    rows = json.loads(_leadframe(clean, "devices", "--json").stdout)
    rows = rows["devices"] if isinstance(rows, dict) else rows
    found = {row["name"]: row for row in rows}
    assert set(found) == {"reference", "scratch", "torchdev"}
    assert found["scratch"]["state"] == "ready"
    assert found["scratch"]["distribution"] == "leadframe-example-scratch"


@pytest.mark.parametrize("device", PLATFORMS)
def test_a_platform_passes_the_core_tier(clean, device):
    report = clean / f"{device}.json"
    _leadframe(clean, "conformance", device, "--report", report)
    assert "core tier conformant" in _leadframe(clean, "conformance", "verify", report).stdout


def test_a_kernel_plugin_is_used_and_passes(clean):
    _build(EXAMPLES / "fast-attention", clean)
    _install(clean, clean / "env/bin/python", *(clean / "wheels").glob("*fast_attention*.whl"))
    report = clean / "kernel.json"
    _leadframe(clean, "conformance", "reference", "--report", report)
    ops = {op["op"]: op["implementation"] for op in json.loads(report.read_text())["ops"]}
    assert ops["attention"] == "row-by-row"


def test_a_generated_backend_passes_as_it_is(clean):
    _leadframe(clean, "new-backend", "mychip")
    _build(clean / "leadframe-mychip", clean)
    _install(clean, clean / "env/bin/python", *(clean / "wheels").glob("*mychip*.whl"))
    _leadframe(clean, "conformance", "mychip")


@contextmanager
def _server(folder, device):
    port = 18000 + os.getpid() % 2000
    log = (folder / f"serve-{device}.log").open("w")
    command = [folder / "env/bin/leadframe", "serve", "--device", device, "--port", str(port)]
    command += ["--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-memory-bytes"]
    command = [str(part) for part in (*command, 64 << 20)]
    server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", server, Path(log.name)
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def _post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as reply:
        return json.load(reply)


def _wait(base, server, log):
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("device", [*PLATFORMS, "reference"])
def test_it_serves_the_default_model(clean, device):
    with _server(clean, device) as (base, server, log):
        _wait(base, server, log)
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in _post(f"{base}/v1/completions", body)["choices"][0]["text"]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("example", LIMITS)
def test_an_example_is_small_and_imports_only_the_contract(example):
    sources = list((EXAMPLES / example).rglob("*.py"))
    own = f"leadframe_example_{example.replace('-', '_')}"
    for path in sources:
        for name in _imports(path):
            if name.startswith("leadframe"):
                assert name in PUBLIC or name.startswith(own), f"{path} imports {name}"
    lines = sum(len(path.read_text().splitlines()) for path in sources if "src" in path.parts)
    assert lines <= LIMITS[example]


def test_the_scratch_example_is_what_the_generator_writes(tmp_path):
    from leadframe.conformance.new_backend import write_backend

    for path in write_backend("scratch", tmp_path / "x", "leadframe-example-scratch"):
        same = EXAMPLES / "scratch" / path.relative_to(tmp_path / "x")
        assert path.read_text() == same.read_text(), same
