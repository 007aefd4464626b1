"""The rules that a compiled kernel must meet, and the exceptions that are known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from leadframe_triton.arch import Arch
from leadframe_triton.compile_check.cases import Case
from leadframe_triton.compile_check.resources import Resources


@dataclass(frozen=True, slots=True)
class SpillException:
    """Spills that are known and accepted.

    Attributes:
      family: the chips concerned.
      kernel: the kernel's name.
      head_dim: elements a head.
      most: the limit that takes the place of zero.
      reason: why it is not mended.
    """

    family: str
    kernel: str
    head_dim: int
    most: int
    reason: str


_RDNA3_WIDE: Final = (
    "RDNA3's matrix instructions hold each operand twice; with 256 elements a head the query "
    "tile alone fills the 256 registers at the smallest tile there is. Right, but slow."
)

SPILL_EXCEPTIONS: Final = (
    SpillException("rdna", "ragged_attention", 256, 400, _RDNA3_WIDE),
    SpillException("rdna", "decode_attention", 256, 400, _RDNA3_WIDE),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
      kernel: the kernel.
      config: dtype, shape and tile.
      target: the architecture.
      registers: vector registers a thread.
      spills: bytes of stack a thread (NVIDIA) or spilled vector registers (AMD).
      shared_bytes: shared memory a program.
      tensor_cores: matrix instructions in use; empty when none is.
      seconds: time to compile, or to read from Triton's cache on disk.
      problems: what is wrong; empty when nothing is.
      note: the reason of an accepted exception.
    """

    kernel: str
    config: str
    target: str
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    tensor_cores: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)


WITH_PRODUCT: Final = frozenset({"ragged_attention", "decode_attention", "linear"})
"""Kernels with a matrix product; what else a case launches needs no matrix unit."""


def judge(kernel: str, case: Case, arch: Arch, resources: Resources, seconds: float) -> Row:
    """Holds a kernel's resources against the limits of an architecture.

    Args:
      kernel: the kernel's name; a case may launch several.
      case: what launched it.
      arch: the chip.
      resources: what it takes.
      seconds: what compiling the case took.
    """
    problems = []
    accepted = _exception(kernel, case.head_dim, arch)
    if resources.spills > (accepted.most if accepted else 0):
        problems.append(
            f"spills {resources.spills} (limit {accepted.most if accepted else 0}): "
            "use a smaller tile or more warps"
        )
    if resources.shared_bytes > arch.shared_bytes:
        problems.append(
            f"takes {resources.shared_bytes:,} bytes of shared memory, {arch.name} has "
            f"{arch.shared_bytes:,}: use a smaller tile or fewer stages"
        )
    needs = case.needs_matrix_unit and kernel in WITH_PRODUCT
    if needs and not resources.tensor_cores:
        problems.append("has no matrix instruction: a dot shape is too small for the matrix unit")
    return Row(
        kernel,
        case.config,
        arch.name,
        resources.registers,
        resources.spills,
        resources.shared_bytes,
        resources.tensor_cores,
        round(seconds, 2),
        tuple(problems),
        accepted.reason if accepted and resources.spills else "",
    )


def _exception(kernel: str, head_dim: int, arch: Arch) -> SpillException | None:
    wanted = (arch.family, kernel, head_dim)
    for entry in SPILL_EXCEPTIONS:
        if (entry.family, entry.kernel, entry.head_dim) == wanted:
            return entry
    return None
