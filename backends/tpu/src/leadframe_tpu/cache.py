"""The persistent compilation cache of JAX, and whether it served a compilation.

The cache is a setting of the process: two backends of one process share the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.monitoring

_HIT = "/jax/compilation_cache/cache_hits"


def default_folder(env: Mapping[str, str]) -> Path:
    """Returns where compiled steps are kept unless told otherwise: beside the other backends'.

    A variable that is empty is one that is not set.
    """
    chosen = env.get("LEADFRAME_CACHE_DIR")
    if chosen:
        return Path(chosen, "tpu")
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "leadframe", "tpu")


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


@dataclass(slots=True)
class CacheWatch:
    """Counts programs that came from the cache."""

    hits: int = 0

    def __call__(self, event: str, **_: str | int) -> None:
        """Called by JAX for each of its events."""
        self.hits += event == _HIT


@contextmanager
def watch_cache() -> Iterator[CacheWatch]:
    """Counts the cache hits of what is compiled inside."""
    watch = CacheWatch()
    jax.monitoring.register_event_listener(watch)
    try:
        yield watch
    finally:
        jax.monitoring.unregister_event_listener(watch)


def is_cache_used() -> bool:
    """Whether this process keeps compiled programs."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    return all(getattr(jax.config, name) for name in names)
