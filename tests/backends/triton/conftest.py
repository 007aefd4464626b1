"""Batches with an oracle, for the kernels; and the rule that a process has one Triton mode."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def pytest_collection_modifyitems(config, items):
    """Deselects what this process cannot run: Triton interprets or compiles, never both."""
    wrong = "triton_aot" if INTERPRETED else "triton_interp"
    dropped = [item for item in items if item.get_closest_marker(wrong)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker(wrong)]


def _load(name):
    """Loads a neighbour: with importlib imports, tests have no package to import it from."""
    full = f"leadframe_triton_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def problems():
    return _load("problems")


@pytest.fixture
def context():
    """The interpreter, with tiles small enough that short contexts take several iterations."""
    from leadframe_triton.arch import INTERPRETER
    from leadframe_triton.launch import LaunchContext
    from leadframe_triton.tiles import Tile

    tiles = {"ragged": Tile(16, 32, 4, 1), "decode": Tile(16, 32, 4, 1)}
    return LaunchContext(INTERPRETER, choose_tile=lambda arch, key: tiles[key.kind])
