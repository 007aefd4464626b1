"""What a run proves, from what happened in it rather than from what its author says."""

from __future__ import annotations

import os
from typing import Final, Literal

from leadframe.conformance.kit import Kit
from leadframe.platform.plugin import open_device_files

Evidence = Literal["hardware", "interpreter", "compiled-only", "simulated"]
LEVELS: Final = ("hardware", "interpreter", "compiled-only", "simulated")

_INTERPRETER_VARIABLES = ("TRITON_INTERPRET",)


def evidence_level(kit: Kit) -> tuple[Evidence, str]:
    """Returns the level and the observation behind it.

    A backend may lower its level through `Capabilities.simulated`; it cannot raise it: an
    accelerator whose process holds no device file open did not compute on one.
    """
    interpreted = [name for name in _INTERPRETER_VARIABLES if os.environ.get(name, "0") != "0"]
    kind = kit.plugin.info().kind if kit.plugin is not None else "test"
    said = kit.backend.caps.simulated
    if kind == "accelerator" and interpreted:
        return "interpreter", f"{interpreted[0]} is set"
    if said:
        return said, "the backend says so"
    if kind != "accelerator":
        return "hardware", "runs natively on the host's processor"
    files = sorted(open_device_files())
    if not files:
        return "simulated", "no device file was open after the run"
    return "hardware", f"device files open after the run: {', '.join(files)}"


__all__ = ["LEVELS", "Evidence", "evidence_level"]
