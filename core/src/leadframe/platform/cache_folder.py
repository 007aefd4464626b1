"""Where backends keep what is dear to make again, from one process to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_root(env: Mapping[str, str] = os.environ) -> Path:
    """Returns `$LEADFRAME_CACHE_DIR`, else `leadframe` in `$XDG_CACHE_HOME` or `~/.cache`.

    It need not exist. A variable that is empty is one that is not set.
    """
    chosen = env.get("LEADFRAME_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "leadframe")
