"""Writes stand-ins for the CUDA libraries that a CUDA build of torch needs to be imported.

PyPI carries torch 2.8.0 for Linux only as a CUDA build: its import fails without 2.7 GB of
`nvidia-*` wheels that no CPU test calls. This script finds the shared libraries that torch's own
ones need and that are not there, and compiles an empty one for each into torch/lib, where torch's
run path looks. Every function in them returns "no CUDA device", so that
`torch.cuda.is_available()` is False. With a CPU build of torch nothing is missing and nothing is
written. For test environments only: use it with the Python that runs the tests.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice; any other library reads it as a failure too."""

SPECIAL = {"cudaGetErrorString", "cudaGetErrorName"}
"""Functions that return text."""

UNVERSIONED = ("cuFile", "cusparseLt", "nccl")
"""Prefixes of the functions of NVIDIA's libraries that carry no version."""


def readelf(*args: str) -> str:
    """Runs readelf and returns what it prints."""
    return subprocess.run(["readelf", *args], check=True, capture_output=True, text=True).stdout


def missing_libraries(lib: Path) -> set[str]:
    """Returns the needed libraries that neither torch/lib nor the system has."""
    needed: set[str] = set()
    for path in lib.glob("*.so"):
        needed |= set(re.findall(r"NEEDED.*\[(.+)\]", readelf("-d", str(path))))
    system = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    have = {path.name for path in lib.iterdir()} | set(re.findall(r"^\s+(\S+) \(", system, re.M))
    installed = {path.name for path in lib.parent.parent.glob("nvidia/*/lib/*")}
    return needed - have - installed - {"ld-linux-x86-64.so.2"}


def symbols(lib: Path) -> dict[str, set[str]]:
    """Returns undefined functions by the version they ask for; "" when they ask for none.

    NVIDIA's libraries use their file name as version.
    """
    undefined: dict[str, set[str]] = {}
    defined: set[str] = set()
    for path in [*lib.glob("*.so"), lib / "libgomp.so.1"]:
        if not path.exists():
            continue
        for line in readelf("--dyn-syms", "-W", str(path)).splitlines():
            parts = line.split()
            if len(parts) < 8 or not parts[0].endswith(":"):
                continue
            name, _, version = parts[7].replace("@@", "@").partition("@")
            if parts[6] != "UND":
                defined.add(name)
            elif parts[4] == "GLOBAL":
                undefined.setdefault(version, set()).add(name)
    unversioned = undefined.get("", set()) - defined
    undefined[""] = {name for name in unversioned if name.startswith(UNVERSIONED)}
    return undefined


def source(names: set[str]) -> str:
    """Returns C that defines every name."""
    functions = [
        f'const char *{name}(void) {{ return "stand-in library: no CUDA"; }}'
        if name in SPECIAL
        else f"int {name}(void) {{ return {NO_DEVICE}; }}"
        for name in sorted(names)
    ]
    return "\n".join(functions) + "\n"


def build(target: Path, names: set[str], version: str) -> None:
    """Compiles one stand-in whose symbols carry `version`."""
    with tempfile.TemporaryDirectory() as work:
        code, script = Path(work, "standin.c"), Path(work, "standin.map")
        code.write_text(source(names))
        script.write_text(f"{version} {{ global: *; }};\n")
        flags = ["-shared", "-fPIC", "-O0", f"-Wl,-soname,{target.name}"]
        flags += [f"-Wl,--version-script={script}"]
        subprocess.run(["gcc", *flags, "-o", str(target), str(code)], check=True)


def main() -> int:
    """Writes what is missing next to torch's libraries."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.stderr.write("torch is not installed here\n")
        return 1
    lib = Path(spec.origin).parent / "lib"
    missing = missing_libraries(lib)
    wanted = symbols(lib) if missing else {}
    for name in sorted(missing):
        names = set(wanted.get(name, ()))
        if name.startswith("libcudart"):
            names |= wanted.get("", set())  # every process that imports torch loads this one
        build(lib / name, names or {"leadframe_standin_empty"}, name)
    result = f"{len(missing)} stand-in libraries written" if missing else "torch needs none"
    sys.stdout.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
