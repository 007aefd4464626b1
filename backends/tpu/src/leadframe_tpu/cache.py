"""The persistent compilation cache of JAX, and whether it served a compilation.

The cache is a setting of the process: two backends of one process share the first one's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import jax
import jax.monitoring

from leadframe.platform.cache_folder import cache_root

_HIT = "/jax/compilation_cache/cache_hits"


def default_folder(env: Mapping[str, str]) -> Path:
    """Returns where compiled steps are kept unless told otherwise: beside the other backends'."""
    return cache_root(env) / "tpu"


def use_folder(folder: Path) -> None:
    """Keeps compiled programs in a folder that only this user may write.

    Whoever can write there can run code here: JAX loads what it finds.

    Raises:
      OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_hits() -> int:
    """Returns how many programs this thread has got from the cache so far."""
    _listen()
    return getattr(_counted, "hits", 0)


_counted = threading.local()
"""JAX tells of a hit in the thread that compiles; others may compile at the same time."""


@lru_cache(maxsize=1)
def _listen() -> None:
    jax.monitoring.register_event_listener(_count)


def _count(event: str, **_: str | int) -> None:
    if event == _HIT:
        _counted.hits = getattr(_counted, "hits", 0) + 1


def is_cache_used() -> bool:
    """Whether this process keeps compiled programs."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    return all(getattr(jax.config, name) for name in names)
