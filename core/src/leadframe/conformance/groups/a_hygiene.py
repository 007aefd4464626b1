"""Group A: loading a plugin changes nothing but what it owns."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from leadframe.conformance.attention_cases import Shape, check_outcome, make_problem, solve
from leadframe.conformance.case import Case, ConformanceFailure
from leadframe.conformance.groups.b_attention import LAYOUTS, fit
from leadframe.conformance.kit import Kit
from leadframe.platform import KVLayerSpec, KVSpec

_LIBRARIES = ("torch", "jax")
"""What a plugin may patch; imported before it is loaded, so that it shows."""
_INFO_SECONDS = 0.05
_DETECT_SECONDS = 2.0
_PROBE_SECONDS = 240.0


def probe(kit: Kit) -> dict[str, Any]:
    """Loads the plugin in a fresh process, once per kit; see `leadframe.conformance.probe`.

    It asks the kit's backend nothing: that may hold the device.
    """
    if not kit.probe_report:
        preload = ["numpy", *(name for name in _LIBRARIES if find_spec(name) is not None)]
        command = [sys.executable, "-m", "leadframe.conformance.probe", *kit.probe_args]
        done = subprocess.run(
            [*command, "--preload", *preload],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            raise ConformanceFailure(f"the probe failed: {done.stderr.strip()[-500:]}")
        kit.probe_report.update(json.loads(lines[-1]))
    return kit.probe_report


def _needs_plugin(kit: Kit) -> str | None:
    return None if kit.probe_args else "this backend was not loaded from a plugin"


def _loads_alone(kit: Kit) -> None:
    """It loads, runs a step and closes in a process where the engine cannot be imported."""
    report = probe(kit)
    kit.check(not report["error"], f"in a process without the engine: {report['error']}")


def _info_is_light(kit: Kit) -> None:
    report = probe(kit)
    seconds, heavy = report.get("info_seconds", 0.0), report.get("heavy_after_info", [])
    kit.metrics["info_seconds"] = seconds
    kit.check(not heavy, f"platform_info needs {', '.join(heavy)}: import it in platform_create")
    kit.check(seconds < _INFO_SECONDS, f"platform_info takes {seconds:.3f} s, limit 0.05 s")


def _detect_is_light(kit: Kit) -> None:
    report = probe(kit)
    seconds, opened = report.get("detect_seconds", 0.0), report.get("opened_by_detect", [])
    kit.metrics["detect_seconds"] = seconds
    kit.check(not opened, f"platform_detect leaves {', '.join(opened)} open")
    kit.check(seconds < _DETECT_SECONDS, f"platform_detect takes {seconds:.1f} s, limit 2 s")


def _no_patches(kit: Kit) -> None:
    """Functions, classes and methods of libraries and of Leadframe are what they were."""
    patched = probe(kit).get("patched", [])
    kit.check(not patched, f"loading replaces {', '.join(patched[:5])}")


def _two_backends(kit: Kit) -> None:
    """Two backends in one process do not disturb each other, nor does closing one."""
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng)
    second = Kit(open=kit.open, device=kit.device, notes=kit.notes)
    first_out, second_out = solve(kit, problem), solve(second, problem)
    check_outcome(kit, problem, first_out)
    check_outcome(second, problem, second_out)
    array = kit.backend.upload(np.arange(8, dtype=np.float32))
    second.backend.close()
    kit.same("array of the other backend", kit.get(array), np.arange(8, dtype=np.float32))
    check_outcome(kit, problem, solve(kit, problem))


def _close_frees(kit: Kit) -> None:
    """Ten backends opened, used and closed leave no memory behind."""
    shape = fit(kit, Shape())
    spec = KVSpec((KVLayerSpec(2, shape.dim),), shape.block_size, shape.dtype)
    size = 64 * kit.backend.kv_block_bytes(spec)
    used = []
    for _ in range(10):
        backend = kit.open()
        used.append(backend.memory().used)
        backend.kv_alloc(spec, 64)
        backend.upload(np.ones(1 << 16, np.float32))
        backend.close()
        gc.collect()
    growth = used[-1] - used[1]
    kit.check(growth < size, f"8 backends, opened and closed, leave {growth:,} bytes")


def _globals_unchanged(kit: Kit) -> None:
    """A further backend and a step leave NumPy's error state and random state alone."""
    before = _random_state()
    problem = make_problem(fit(kit, LAYOUTS["decode"]), kit.rng)
    with np.errstate(all="ignore"):
        errors = np.geterr()
        other = Kit(open=kit.open, device=kit.device)
        solve(other, problem)
        other.backend.close()
        after = np.geterr()
    kit.check(after == errors, "a step changes NumPy's error state")
    kit.check(_random_state() == before, "a step draws from NumPy's global random state")


def _random_state() -> str:
    return repr(np.random.get_state(legacy=False))


CASES = [
    Case("A.load[without-engine]", _loads_alone, "core", _needs_plugin),
    Case("A.load[no-patches]", _no_patches, "core", _needs_plugin),
    Case("A.hooks[info-is-light]", _info_is_light, "core", _needs_plugin),
    Case("A.hooks[detect-is-light]", _detect_is_light, "core", _needs_plugin),
    Case("A.process[two-backends]", _two_backends),
    Case("A.process[close-frees]", _close_frees),
    Case("A.process[globals]", _globals_unchanged),
]
