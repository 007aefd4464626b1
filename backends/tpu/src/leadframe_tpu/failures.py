"""XLA's errors in the contract's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import jax

from leadframe.errors import CompileError, DeviceLost, DeviceOOM, LeadframeError
from leadframe.platform.batch import Bucket

_LOST: Final = ("UNAVAILABLE", "DATA_LOSS", "ABORTED")
_HALTED: Final = "halted"
_ASKED: Final = ("to allocate ", "to reserve ")
"""What precedes a number of bytes; scratch is reserved, all else allocated."""
_SIZE: Final = re.compile(r"([\d.]+)([KMGT]?)i?B?(?: bytes)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@contextmanager
def device_errors(phase: str, requested: int, free: Callable[[], int]) -> Iterator[None]:
    """Raises what XLA raises inside as `DeviceOOM` or `DeviceLost`.

    Args:
      phase: what is being done.
      requested: bytes that it asks for, as far as is known.
      free: bytes that are free; asked only when memory ran out.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if text.startswith("RESOURCE_EXHAUSTED"):
            raise DeviceOOM(requested or asked_bytes(text), free(), phase) from error
        if text.startswith(_LOST) or _HALTED in text:
            raise DeviceLost(
                f"the TPU stopped answering during {phase}: {first_line(text)}"
            ) from error
        raise


@contextmanager
def compile_errors(bucket: Bucket, free: Callable[[], int]) -> Iterator[None]:
    """Raises a failed compilation as `CompileError`, or `DeviceOOM` where HBM does not suffice.

    On-chip memories are exhausted too; that is a fault of a kernel, which no setting mends.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if text.startswith("RESOURCE_EXHAUSTED") and _is_hbm(text):
            raise DeviceOOM(asked_bytes(text), free(), "compile") from error
        raise CompileError(bucket, first_line(text)) from error
    except LeadframeError:
        raise
    except Exception as error:  # tracing and Mosaic raise all kinds
        raise CompileError(bucket, f"{type(error).__name__}: {first_line(str(error))}") from error


def _is_hbm(text: str) -> bool:
    """Whether the compiler ran out of HBM, or the chip did when it loaded the program."""
    return "memory space hbm" in text.lower() or any(marker in text for marker in _ASKED)


def asked_bytes(text: str) -> int:
    """Finds the number of bytes that a message of XLA says were asked for; 0 if it does not."""
    for marker in (*_ASKED, "Used "):
        _, found, rest = text.partition(marker)
        size = _SIZE.match(rest) if found else None
        if size is not None:
            return int(float(size[1]) * _UNITS[size[2].upper()])
    return 0


def first_line(text: str) -> str:
    """Returns the first line of a message, at a length that a log bears."""
    return text.partition("\n")[0][:500]
