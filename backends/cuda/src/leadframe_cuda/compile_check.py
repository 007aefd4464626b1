"""`leadframe compile-check cuda`."""

from __future__ import annotations

from functools import partial
from typing import Final

from leadframe_triton.compile_check.main import main as check

main: Final = partial(check, "cuda", "cuda")
"""What the entry point names: takes the arguments, returns the exit status."""
