"""The native kernels: compiled for this very processor at first use, then loaded from a cache.

Nothing but a C++ compiler is needed. Without one, or when it fails, `load_library` says why and
the backend runs on torch's ops alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from leadframe.platform.cache_folder import cache_root
from leadframe_cpu.cpu_info import cpu_info

logger = logging.getLogger(__name__)

COMPILERS: Final = ("g++", "c++", "clang++")
FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # products are fused only where the source says so
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)
_TIMEOUT_SECONDS: Final = 300


class NativeUnavailable(Exception):
    """The native kernels cannot be built or loaded here; the message says why."""


class Kernel:
    """A function of the library whose argument is one struct of eight-byte fields.

    Attributes:
      address: where the function is, for recorded steps.
    """

    def __init__(self, library: Library, name: str, layout: str, *, is_long: bool) -> None:
        # A long call lets other Python threads run. A short one keeps the interpreter: giving it
        # away costs more than the call, and getting it back may cost milliseconds.
        loaded = library.parallel if is_long else library.serial
        self._function = getattr(loaded, name)
        self._function.argtypes, self._function.restype = [ctypes.c_char_p], None
        self.address: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.pack = struct.Struct("=" + layout).pack

    def __call__(self, packed: bytes) -> None:
        """Runs the function on arguments that `pack` made."""
        self._function(packed)


class Library:
    """The loaded shared object, twice: with and without giving the interpreter lock away.

    Attributes:
      path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parallel, self.serial = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._declare("lf_set_threads", 2, None)
        self._declare("lf_packed_bytes", 3, ctypes.c_int64)
        self._declare("lf_advise_huge", 2, None)
        self._declare("lf_run", 2, None)

    def _declare(self, name: str, count: int, result: type[ctypes.c_int64] | None) -> None:
        function = getattr(self.parallel, name)
        function.argtypes, function.restype = [ctypes.c_int64] * count, result

    def set_threads(self, count: int, spin_us: int) -> None:
        """Sets how many threads share an op, and for how long idle ones spin before sleeping."""
        self.parallel.lf_set_threads(count, spin_us)

    def packed_bytes(self, layout: int, rows: int, columns: int) -> int:
        """Bytes of a packed weight [rows, columns] in a format."""
        return int(self.parallel.lf_packed_bytes(layout, rows, columns))

    def advise_huge(self, address: int, size: int) -> None:
        """Asks the system to back a long-lived buffer with huge pages."""
        self.parallel.lf_advise_huge(address, size)

    def run(self, calls: int, count: int) -> None:
        """Runs recorded calls: `calls` is the address of (function, arguments) pairs."""
        self.parallel.lf_run(calls, count)


@lru_cache(maxsize=1)
def load_library() -> Library:
    """Returns the native kernels, compiling them if no cache has them.

    Raises:
      NativeUnavailable: there is no compiler, or it failed.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(
            f"no C++ compiler ({', '.join(COMPILERS)}) was found; run: apt-get install g++"
        )
    sources = _sources()
    with _kernel_folder() as folder:
        target = folder / _key(compiler, sources) / "kernels.so"
        if not target.exists():
            _build(compiler, [path for path in sources if path.suffix == ".cpp"], target)
        try:
            return Library(target)
        except (OSError, AttributeError) as error:
            target.unlink(missing_ok=True)  # damaged: the next start builds it again
            raise NativeUnavailable(f"{target} could not be loaded: {error}") from error


@contextmanager
def _kernel_folder() -> Iterator[Path]:
    """Where to build or find the kernels: the cache, or a folder that is removed after loading."""
    if (folder := cache_folder()) is not None:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="leadframe-") as name:
            yield Path(name)


def cache_folder() -> Path | None:
    """Returns where compiled kernels are kept: the user's cache, or None if it cannot be used.

    What lies there is loaded into this process, so a folder that others may write is not used.
    """
    try:
        folder = cache_root() / "cpu"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_private = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return folder if is_private and os.access(folder, os.W_OK) else None


def _sources() -> list[Path]:
    folder = Path(str(files("leadframe_cpu") / "native"))
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _key(compiler: str, sources: Sequence[Path]) -> str:
    """Changes with the sources, the compiler, its flags and the processor."""
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} could not be run: {error}") from error
    digest = hashlib.sha256("\0".join((compiler, version.stdout, *FLAGS)).encode())
    digest.update(" ".join(sorted(cpu_info().flags)).encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _build(compiler: str, sources: Sequence[Path], target: Path) -> None:
    start = time.perf_counter()
    # A warning, because it is shown where nobody set up logging: the start seems to hang else.
    logger.warning(
        "compiling the CPU kernels for %s, at the first start only: some ten seconds of a core",
        cpu_info().name,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        _run_all(commands)
        shared = Path(folder) / "kernels.so"
        _run_all([[compiler, "-shared", "-pthread", *map(str, objects), "-o", str(shared)]])
        os.replace(shared, target)  # whole or not at all, also when two processes build at once
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - start, target)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Runs commands side by side.

    Raises:
      NativeUnavailable: one failed or took too long.
    """

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )

    try:
        with ThreadPoolExecutor(len(commands)) as pool:
            finished = list(pool.map(run, commands))
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"the compiler took over {_TIMEOUT_SECONDS} s") from error
    for process in finished:
        if process.returncode:
            raise NativeUnavailable(f"the compiler failed: {process.stderr.strip()[-500:]}")
