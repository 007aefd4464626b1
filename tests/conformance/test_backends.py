"""The backends that need no silicon pass the kit, in processes of their own."""

import json
import subprocess
import sys

import pytest

from leadframe.conformance.report import verify

DEVICES = {
    "reference": ("full", "hardware"),
    "cpu": ("core", "hardware"),
    "sim": ("core", "simulated"),
    "sim:compile": ("core", "simulated"),
    "sim:nograph": ("core", "simulated"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_conforms(device, tmp_path):
    tier, evidence = DEVICES[device]
    path = tmp_path / "report.json"
    script = "from leadframe.conformance import main; raise SystemExit(main())"
    command = [sys.executable, "-c", script, device, "--tier", tier, "--report", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    report = json.loads(path.read_text())
    assert verify(report) == []
    assert (report["verdict"], report["evidence"]) == ("conformant", evidence)
