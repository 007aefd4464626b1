"""What must be set before JAX and libtpu are imported to compile without a chip."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

from leadframe_tpu.detect import is_usable

DEFAULT_TARGETS: Final = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")

_SETTINGS: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def prepare_environment() -> None:
    """Sets what the user has not set.

    Several processes may load libtpu to compile, but on a TPU host that would let two of them
    open one chip, so there its lock stays.
    """
    usable = is_usable(os.environ)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not usable:
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def has_compiler() -> bool:
    """Whether libtpu is installed."""
    return find_spec("libtpu") is not None
