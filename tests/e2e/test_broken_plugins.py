"""Broken plugins on the command line: one screen, the right exit code, never another device."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

GOOD = """
from leadframe.platform import Detection, Device, PlatformInfo, hookimpl

@hookimpl
def platform_info():
    return PlatformInfo("brk", "a test", (1, 0), (1, 0), "leadframe-brk", "2.3", "accelerator")

@hookimpl
def platform_detect(env):
    return Detection((Device(0, "Chip"),), "one chip")

@hookimpl
def platform_create(device, options, limits):
    raise AssertionError("not reached")
"""


def _but(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


CASES = {
    "import error": ("import nonesuch_library\n" + GOOD, 11, "nonesuch_library"),
    "missing hook": (
        _but("def platform_detect", "def _detect"),
        12,
        "'platform_detect' is missing",
    ),
    "misspelt hook": (GOOD + "\n@hookimpl\ndef platform_kernles(): pass", 12, "platform_kernels"),
    "wrong signature": (_but("detect(env)", "detect(environ)"), 12, "environ"),
    "newer contract": (_but("(1, 0), (1, 0)", "(3, 0), (3, 0)"), 13, "pip install --upgrade"),
    "no device": (
        _but('(Device(0, "Chip"),), "one chip"', '(), "bus is empty"'),
        14,
        "bus is empty",
    ),
    "detection raises": (
        _but("    return Detection", "    1 / 0\n    return Detection"),
        12,
        "division",
    ),
    "detection hangs": (
        _but("    return Detection", "    import time; time.sleep(60)\n    return Detection"),
        12,
        "did not return within 0.5 s",
    ),
    "create raises": (GOOD, 20, "not reached"),
}


def _install(folder: Path, distribution: str, module: str, text: str) -> None:
    """Puts a distribution with an entry point on a path, without pip."""
    (folder / f"{module}.py").write_text(textwrap.dedent(text))
    info = folder / f"{distribution.replace('-', '_')}-2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.3\n")
    (info / "entry_points.txt").write_text(f"[leadframe]\nbrk = {module}\n")


def _serve(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(folder), "LEADFRAME_DETECT_TIMEOUT": "0.5"}
    env.pop("LEADFRAME_DEVICE", None)
    command = [sys.executable, "-m", "leadframe.cli.main", "serve", *arguments]
    started = time.monotonic()
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done, time.monotonic() - started


def _check_screen(done, code, text):
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert text in output
    assert "leadframe-brk" in output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 24
    assert "http://" not in output


@pytest.mark.parametrize("case", CASES)
def test_a_broken_plugin_is_one_screen_and_a_distinct_exit_code(tmp_path, case):
    text, code, message = CASES[case]
    _install(tmp_path, "leadframe-brk", "brk_plugin", text)
    done, _ = _serve(tmp_path, "--device", "brk")
    _check_screen(done, code, message)


def test_two_distributions_that_claim_one_name(tmp_path):
    _install(tmp_path, "leadframe-brk", "brk_plugin", GOOD)
    _install(tmp_path, "another-brk", "other_plugin", GOOD)
    done, _ = _serve(tmp_path, "--device", "brk")
    _check_screen(done, 15, "another-brk 2.3 and leadframe-brk 2.3")


def test_auto_does_not_hide_it(tmp_path):
    _install(tmp_path, "leadframe-brk", "brk_plugin", "import nonesuch_library\n")
    done, _ = _serve(tmp_path, "--device", "auto")
    _check_screen(done, 15, "nonesuch_library")


def test_a_failure_is_quick(tmp_path):
    _install(tmp_path, "leadframe-brk", "brk_plugin", CASES["import error"][0])
    _serve(tmp_path, "--device", "brk")  # writes bytecode
    fastest = min(_serve(tmp_path, "--device", "brk")[1] for _ in range(5))
    assert fastest < 2.0
