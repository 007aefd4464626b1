"""Chooses attention tiles by measuring them once, and remembers the choice on disk.

A choice depends on constants of the model and on the chip, never on a batch, so that it holds
for the life of a process and kernels are not compiled again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import triton

from leadframe.platform.cache_folder import cache_root
from leadframe_triton.arch import Arch
from leadframe_triton.launch import TileKey, default_tile
from leadframe_triton.tiles import Tile, tiles_for

_LOG = logging.getLogger(__name__)
_FILE: Final = "triton-tiles.json"

Measure = Callable[[Arch, TileKey, Tile], float]
"""Seconds that a representative launch takes with a tile."""


def cache_path() -> Path:
    """Where choices are kept."""
    return cache_root() / _FILE


def chip_name(device: torch.device) -> str:
    """The product, as its driver calls it."""
    if device.type == "cpu":
        return "host"
    return str(torch.get_device_module(device).get_device_name(device))


def key_text(arch: Arch, chip: str, key: TileKey) -> str:
    """The name of a choice on disk. Another Triton compiles other code: it is part of it.

    So is the product: those of one architecture differ in cores and bandwidth, and may share a
    home directory.
    """
    window = " window" if key.windowed else ""
    return (
        f"{arch.name} ({chip}) triton-{triton.__version__} {key.kind} D{key.head_dim} G{key.group} "
        f"bytes{key.element_bytes} block{key.block_size}{window}"
    )


class TileTuner:
    """Picks the tile of an attention kernel: from memory, from disk, by measuring, or by default.

    Args:
      device: where to measure.
      measure: whether to measure what is not on disk; otherwise the default is taken.
      path: the file of choices; None takes `cache_path()`.
      timer: how a tile is timed; None launches the kernel on the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        measure: bool = False,
        path: Path | None = None,
        timer: Measure | None = None,
    ) -> None:
        self._device, self._measure = device, measure
        self._chip = chip_name(device)
        self._path = path or cache_path()
        self._timer = timer
        # Keyed by plain tuples: a traced step looks tiles up, and traces nothing else.
        self._chosen: dict[tuple[object, ...], Tile] = {}

    def __call__(self, arch: Arch, key: TileKey) -> Tile:
        """Returns the tile for a key; always the same one."""
        name = (arch.name, *key)
        if name not in self._chosen:
            self._chosen[name] = self._choose(arch, key)
        return self._chosen[name]

    def _choose(self, arch: Arch, key: TileKey) -> Tile:
        stored = self._stored(arch, key)
        if stored is not None:
            return stored
        return self._best(arch, key) if self._measure else default_tile(arch, key)

    def _stored(self, arch: Arch, key: TileKey) -> Tile | None:
        """A stored choice, if it is still among the candidates."""
        stored = _read(self._path).get(key_text(arch, self._chip, key), {}).get("tile")
        candidates = tiles_for(arch, key.kind, key.head_dim, key.element_bytes)
        return next((tile for tile in candidates if tile.as_dict() == stored), None)

    def _best(self, arch: Arch, key: TileKey) -> Tile:
        timer = self._timer or self._device_timer()
        candidates = tiles_for(arch, key.kind, key.head_dim, key.element_bytes)
        seconds = {tile: timer(arch, key, tile) for tile in candidates}
        best = min(candidates, key=lambda tile: seconds[tile])
        _LOG.info(
            "tile for %s: %s (%.1f us)", key_text(arch, self._chip, key), best, 1e6 * seconds[best]
        )
        timings = {str(tile): value for tile, value in seconds.items()}
        _store(
            self._path,
            key_text(arch, self._chip, key),
            {"tile": best.as_dict(), "seconds": timings},
        )
        return best

    def _device_timer(self) -> Measure:
        from leadframe_triton.measure import DeviceTimer

        return DeviceTimer(self._device)


def _read(path: Path) -> dict[str, Any]:
    """The file's choices; none when it is absent or is not ours."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _store(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Adds a choice. The file is replaced as a whole: readers never see half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**_read(path), name: entry}, indent=1, sort_keys=True))
        partial.replace(path)
    except OSError as error:
        _LOG.warning("cannot remember tiles in %s: %s", path, error)
