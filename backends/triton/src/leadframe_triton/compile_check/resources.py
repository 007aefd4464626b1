"""Reading registers, spills, shared memory and matrix instructions from compiled kernels."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton

from leadframe_triton.arch import Arch

_NVIDIA_MMA: Final = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.\S+")
_NVIDIA_SHAPE: Final = re.compile(r"m\d+n\d+k\d+")
_AMD_MMA: Final = re.compile(r"\bv_(?:mfma|wmma)_\w+")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel costs.

    Attributes:
      registers: vector registers a thread.
      spills: bytes of stack a thread on NVIDIA; spilled vector registers on AMD. AMD's scalar
        registers spill to lanes of vector registers, not to memory, and do not count.
      shared_bytes: shared memory (LDS) a program, static and dynamic.
      tensor_cores: the matrix instructions in use, space separated; empty when none is.
    """

    registers: int
    spills: int
    shared_bytes: int
    tensor_cores: str


def resources_of(compiled: Any, arch: Arch) -> Resources:
    """Reads the resources of a kernel that was compiled for `arch`."""
    if arch.vendor == "cuda":
        return _nvidia(compiled)
    return _amd(compiled)


def _nvidia(compiled: Any) -> Resources:
    usage = _cubin_usage(compiled.asm["cubin"])
    found = {_nvidia_name(match) for match in _NVIDIA_MMA.finditer(compiled.asm["ptx"])}
    return Resources(
        registers=usage["REG"],
        spills=usage["STACK"],
        # Not cuobjdump's SHARED, which leaves dynamic shared memory out.
        shared_bytes=int(compiled.metadata.shared),
        tensor_cores=", ".join(sorted(found)),
    )


def _nvidia_name(instruction: re.Match[str]) -> str:
    shape = _NVIDIA_SHAPE.search(instruction.group())
    return f"{instruction.group(1)}.{shape.group()}" if shape else instruction.group(1)


def _cubin_usage(cubin: bytes) -> dict[str, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def _amd(compiled: Any) -> Resources:
    text: str = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count"),
        shared_bytes=int(compiled.metadata.shared),
        tensor_cores=", ".join(sorted(set(_AMD_MMA.findall(text)))),
    )
