"""No races, no reads of memory that was never written, on JAX's simulated TPU.

The interpreter of the other tests runs copies at once and in order, so it cannot see a missing
wait. Each run has a process of its own with a time limit, because a wrong semaphore hangs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("race_probe.py")


def run(kind):
    done = subprocess.run(
        [sys.executable, str(PROBE), kind], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_clean_whenever_copies_run():
    found = run("clean")
    assert len(found) == 5
    assert set(found.values()) == {"clean"}, found


@pytest.mark.slow
def test_the_simulator_catches_planted_faults():
    found = run("planted")
    assert len(found) == 4
    assert "clean" not in found.values(), found
