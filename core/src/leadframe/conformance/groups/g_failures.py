"""Group G: failures. A step that fails leaves the backend usable; loading fails as specified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from leadframe.conformance.attention_cases import (
    check_outcome,
    make_problem,
    prepare,
    solve,
)
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import LAYOUTS, fit
from leadframe.conformance.kit import Kit
from leadframe.errors import (
    BackendBug,
    CompileError,
    ContractViolation,
    DeviceLost,
    DeviceOOM,
    LeadframeError,
    PlatformError,
)
from leadframe.platform import (
    KV,
    Detection,
    Device,
    PlatformInfo,
    StepArrays,
    create_backend,
    hookimpl,
    select_device,
)
from leadframe.platform.discovery import EntryPoint

_INFO = PlatformInfo("stub", "a stub", (1, 0), (1, 0), "stub-distribution", "0", "test")


class _Deliberate(Exception):
    """What the kit raises inside a step."""


def _still_works(kit: Kit) -> None:
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng)
    check_outcome(kit, problem, solve(kit, problem))


def _exception_in_step(kit: Kit, error: Exception, want: type[Exception]) -> None:
    """An exception inside a step arrives typed, and the next step works."""
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng)
    weights, kv, _ = prepare(kit, problem)

    def step(w: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
        raise error

    def run() -> None:
        kit.compile(step, problem.batch, weights, kv, capture=True).run(problem.batch, kv)

    if want is LeadframeError:
        kit.raises(want, "a step that raises", run)
    else:
        caught = kit.raises(PlatformError, "a step that raises", run)
        is_typed = isinstance(caught, want | CompileError)
        kit.check(is_typed, f"a step that raised {type(error).__name__} gave {caught!r}")
    kit.backend.kv_free(kv)
    _still_works(kit)


def _step_oom(kit: Kit) -> None:
    """`DeviceOOM` from inside a step is not swallowed."""
    _exception_in_step(kit, DeviceOOM(1, 0, "step"), DeviceOOM)


def _step_lost(kit: Kit) -> None:
    _exception_in_step(kit, DeviceLost("the kit says that it is gone"), DeviceLost)


def _step_bug(kit: Kit) -> None:
    _exception_in_step(kit, _Deliberate("planted by the kit"), BackendBug)


def _failed_step_keeps_kv(kit: Kit) -> None:
    """A step that fails before it writes leaves every block as it was."""
    problem = make_problem(fit(kit, LAYOUTS["mixed-padded"]), kit.rng, 2.0)
    weights, kv, exact = prepare(kit, problem)

    def step(w: Any, kv_d: KV, arrays: StepArrays) -> tuple[dict[str, Any], KV]:
        raise _Deliberate("planted by the kit")

    def run() -> None:
        kit.compile(step, problem.batch, weights, kv).run(problem.batch, kv)

    kit.raises(PlatformError, "a step that raises", run)
    ids = list(range(1, len(problem.pool)))
    pool = np.asarray(kit.backend.kv_read(kv[0], ids)).astype(np.float64)
    kit.same("KV after a failed step", pool, exact.pool[1:])
    kit.backend.kv_free(kv)


def _huge_upload(kit: Kit) -> None:
    """A weight larger than the device is `DeviceOOM` before a byte of it is read."""
    total = kit.backend.memory().total

    class Huge:
        shape = (int(4 * total // (4 * 4096)), 4096)
        dtype = "float32"

        def read(self, index: tuple[slice, ...] | None = None) -> Any:
            raise MemoryError(f"reading {self.shape} would need {4 * total:,} bytes")

    kit.raises(
        PlatformError,
        "upload of four times the device's memory",
        lambda: kit.backend.upload(Huge()),
    )
    _still_works(kit)


def _close_twice(kit: Kit) -> None:
    backend = kit.open()
    backend.close()
    backend.close()
    _still_works(kit)


def _stub(detect: Callable[[Mapping[str, str]], Any]) -> EntryPoint:
    def create(device: Device, options: Mapping[str, Any], limits: Any) -> Any:
        raise AssertionError("platform_create must not be reached")

    hooks: dict[str, Callable[..., Any]] = {
        "platform_info": lambda: _INFO,
        "platform_detect": detect,
        "platform_create": create,
    }
    module = SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})
    return EntryPoint("stub", "stub-distribution", "0", lambda: module)


def _hanging_detection(kit: Kit) -> None:
    """Detection that hangs ends with its time-out and names the distribution."""

    def detect(env: Mapping[str, str]) -> Any:
        time.sleep(5)

    env = {"LEADFRAME_DETECT_TIMEOUT": "0.1"}
    error = kit.raises(
        ContractViolation,
        "hanging detection",
        lambda: select_device("stub", env, points=[_stub(detect)]),
    )
    kit.check("stub-distribution" in str(error), f"the error names no distribution: {error}")


def _rubbish_backend(kit: Kit) -> None:
    def detect(env: Mapping[str, str]) -> Detection:
        return Detection((Device(0, "stub"),), "always")

    point = _stub(detect)
    chosen = select_device("stub", {}, points=[point])
    kit.raises(PlatformError, "platform_create that raises", lambda: create_backend(chosen))


CASES = [
    Case("G.step[oom]", _step_oom),
    Case("G.step[lost]", _step_lost),
    Case("G.step[bug]", _step_bug),
    Case("G.step[kv-unchanged]", _failed_step_keeps_kv),
    Case("G.upload[huge]", _huge_upload),
    Case("G.close[twice]", _close_twice),
    Case("G.detect[hang]", _hanging_detection),
    Case("G.create[raises]", _rubbish_backend),
]
