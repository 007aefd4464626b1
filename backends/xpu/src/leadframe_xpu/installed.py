"""What is installed, from package metadata and file names: nothing is imported.

Importing IPEX overrides torch operators for the whole process, and importing it next to the
wrong torch fails inside its own error handling, so that a listing of devices must not try.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

TRITON_DISTRIBUTIONS = ("pytorch-triton-xpu", "triton-xpu", "triton")
"""Distributions that install the package `triton`; any of them may hold the Intel backend."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions of everything that can serve attention on Intel; None is "not installed".

    Attributes:
      torch: torch's version.
      torch_has_xpu: this torch was built for Intel GPUs.
      ipex: the version of intel-extension-for-pytorch.
      vllm_xpu_kernels: the version of vllm-xpu-kernels.
      triton: the version of whatever provides `triton`.
      triton_has_intel: that Triton holds the Intel backend.
    """

    torch: str | None = None
    torch_has_xpu: bool = False
    ipex: str | None = None
    vllm_xpu_kernels: str | None = None
    triton: str | None = None
    triton_has_intel: bool = False

    @property
    def ipex_is_cpu_build(self) -> bool:
        """IPEX's wheel on PyPI holds kernels for the host alone."""
        return self.ipex is not None and "xpu" not in self.ipex


def read_installed(
    version_of: Callable[[str], str] = metadata.version,
    package_of: Callable[[str], Path | None] | None = None,
) -> Installed:
    """Reads the environment.

    Args:
      version_of: returns a distribution's version or raises `PackageNotFoundError`.
      package_of: returns the folder of an importable package, without importing it.
    """
    folder = package_of or package_folder
    torch_folder, triton_folder = folder("torch"), folder("triton")

    def version(name: str) -> str | None:
        try:
            return version_of(name)
        except metadata.PackageNotFoundError:
            return None

    triton_versions = (version(name) for name in TRITON_DISTRIBUTIONS)
    return Installed(
        torch=version("torch"),
        torch_has_xpu=_has(torch_folder, "lib/libtorch_xpu.so"),
        ipex=version("intel-extension-for-pytorch"),
        vllm_xpu_kernels=version("vllm-xpu-kernels"),
        triton=next((found for found in triton_versions if found is not None), None),
        triton_has_intel=_has(triton_folder, "backends/intel"),
    )


def package_folder(name: str) -> Path | None:
    """Returns the folder of a top-level package, without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _has(folder: Path | None, part: str) -> bool:
    return folder is not None and (folder / part).exists()


def release(version: str) -> tuple[int, int]:
    """Returns (major, minor) of a version; (0, 0) when it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
