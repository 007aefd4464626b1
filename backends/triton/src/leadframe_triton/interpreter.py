"""Running the kernels in Triton's interpreter, on host tensors.

Triton decides at import, once per process, whether `@triton.jit` interprets or compiles. A
process that has imported Triton for one cannot do the other.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from leadframe.errors import Unsupported

SWITCH: Final = "TRITON_INTERPRET"
_TRUE: Final = ("1", "true", "on", "yes", "y")


def is_on(value: str | None) -> bool:
    """Whether a value of the switch turns interpretation on, as Triton reads it."""
    return (value or "").lower() in _TRUE


def enable() -> None:
    """Makes Triton interpret in this process; must come before Triton is imported.

    Raises:
      Unsupported: Triton was imported to compile.
    """
    if "triton" in sys.modules and not is_on(os.environ.get(SWITCH)):
        raise Unsupported(
            "interpreter",
            "this process",
            "Triton was imported before and compiles in this process; set "
            f"{SWITCH}=1 before it starts",
        )
    os.environ[SWITCH] = "1"


def refuse_on_device() -> None:
    """Keeps a process that interprets from serving a real device.

    Raises:
      Unsupported: interpretation is on.
    """
    if is_on(os.environ.get(SWITCH)):
        raise Unsupported(
            "device",
            SWITCH,
            f"{SWITCH} is set, so that kernels would be interpreted; unset it and start again",
        )
