"""Loads one plugin in a fresh process and reports what that did to the process.

Run as `python -m leadframe.conformance.probe --device NAME`; prints JSON. It imports only the
contract, and blocks the engine's packages, so that a backend that needs them fails here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

BLOCKED = tuple(
    f"leadframe.{name}"
    for name in (
        "bench",
        "cli",
        "engine",
        "kv_cache",
        "llm",
        "metrics",
        "models",
        "runner",
        "scheduler",
        "server",
        "tokenizer",
        "config",
        "request",
        "sampling_params",
    )
)
HEAVY = ("torch", "jax", "triton", "tensorflow", "cupy", "mlx", "intel_extension_for_pytorch")
WATCHED = ("numpy", "torch", "jax", "array_api_compat", "leadframe", "pluggy")


class _Blocker(importlib.abc.MetaPathFinder):
    """Refuses to import the engine."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in BLOCKED or name.startswith(tuple(f"{b}." for b in BLOCKED)):
            raise ImportError(f"{name} is engine-internal; a backend imports leadframe.platform")
        return None


def _watched_modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith(("leadframe.platform", "leadframe.errors")) or name == "leadframe"
        is_watched = name.partition(".")[0] in WATCHED and not name.startswith("leadframe")
        if isinstance(module, ModuleType) and (is_ours or is_watched):
            yield name, module


def snapshot() -> dict[str, int]:
    """Returns the identity of every function and class, and of every method, by dotted name.

    Only of public code: what a library caches in its own underscored names is its affair.
    """
    out: dict[str, int] = {}
    for name, module in _watched_modules():
        for key, value in list(vars(module).items()):
            if key.startswith("_") or not callable(value):
                continue
            out[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                methods = {m: f for m, f in vars(value).items() if callable(f)}
                out |= {f"{name}.{key}.{m}": id(f) for m, f in methods.items()}
    return out


def _first_use(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Loads the plugin, asks what it is and what is present, creates its backend, uses it."""
    from leadframe.conformance.loading import create, entry_point
    from leadframe.platform.discovery import load_plugin
    from leadframe.platform.plugin import open_device_files

    point = entry_point(args)
    plugin, report["import_seconds"] = _timed(lambda: load_plugin(point))
    info, report["info_seconds"] = _timed(plugin.info)
    report["heavy_after_info"] = sorted(set(HEAVY) & set(sys.modules))
    before = open_device_files()
    found, report["detect_seconds"] = _timed(lambda: plugin.detect(os.environ))
    report["opened_by_detect"] = sorted(open_device_files() - before)
    report["heavy_after_detect"] = sorted(set(HEAVY) & set(sys.modules))
    report["num_devices"], report["reason"] = len(found.devices), found.reason
    for name in args.preload:
        importlib.import_module(name)
    names = snapshot()
    _, backend = create(args, point)
    report["family"], report["kind"] = backend.caps.family, info.kind
    _use(backend)
    backend.close()
    after = snapshot()
    report["patched"] = sorted(name for name in names if after.get(name) != names[name])


def _use(backend: Any) -> None:
    from leadframe.conformance.groups.b_attention import LAYOUTS, fit, run_shape
    from leadframe.conformance.kit import Kit

    kit = Kit(open=lambda: backend)
    run_shape(kit, fit(kit, LAYOUTS["mixed"]))


def _timed(function: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(), time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Probes and prints."""
    sys.meta_path.insert(0, _Blocker())
    from leadframe.conformance.loading import parser

    known = parser()
    known.add_argument("--preload", nargs="*", default=[], help="import before the snapshot")
    args = known.parse_args(argv)
    report: dict[str, Any] = {"error": ""}
    try:
        _first_use(args, report)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
