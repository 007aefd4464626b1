"""What the kernels need to know about a chip, as data. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from leadframe.errors import Unsupported

Vendor = Literal["cuda", "hip", "none"]
"""Triton's name of a target's backend; "none" is the interpreter."""

_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture.

    Attributes:
      name: as vendors write it, such as "sm_90" or "gfx942".
      vendor: Triton's backend for it.
      family: the key of the tile tables.
      warp_size: threads that run in lockstep.
      shared_bytes: the most shared memory (LDS) that one program may take. Compiling does not
        check it; launching does.
      num_cores: SMs or CUs of the largest product; what the device reports takes precedence.
      fp8: 8-bit floating types that the chip converts in hardware: worth a KV cache.
    """

    name: str
    vendor: Vendor
    family: str
    warp_size: int
    shared_bytes: int
    num_cores: int
    fp8: tuple[str, ...] = ()

    @property
    def triton_arch(self) -> int | str:
        """The `arch` of Triton's `GPUTarget`: 90 for "sm_90", "gfx942" as it is."""
        return int(self.name.removeprefix("sm_")) if self.vendor == "cuda" else self.name


_E4M3, _E4M3_FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"

_TABLE: Final = (
    Arch("sm_80", "cuda", "ampere", 32, 163 * _KIB, 108),
    Arch("sm_86", "cuda", "ada", 32, 99 * _KIB, 84),
    Arch("sm_89", "cuda", "ada", 32, 99 * _KIB, 142, (_E4M3,)),
    Arch("sm_90", "cuda", "hopper", 32, 227 * _KIB, 132, (_E4M3,)),
    Arch("sm_100", "cuda", "blackwell", 32, 227 * _KIB, 148, (_E4M3,)),
    Arch("sm_103", "cuda", "blackwell", 32, 227 * _KIB, 148, (_E4M3,)),
    Arch("sm_120", "cuda", "ada", 32, 99 * _KIB, 188, (_E4M3,)),
    Arch("gfx90a", "hip", "cdna", 64, 64 * _KIB, 110),
    Arch("gfx942", "hip", "cdna", 64, 64 * _KIB, 304, (_E4M3_FNUZ,)),
    Arch("gfx950", "hip", "cdna4", 64, 160 * _KIB, 256, (_E4M3,)),
    Arch("gfx1100", "hip", "rdna", 32, 64 * _KIB, 96),
    Arch("gfx1101", "hip", "rdna", 32, 64 * _KIB, 60),
    Arch("gfx1200", "hip", "rdna", 32, 64 * _KIB, 32),
    Arch("gfx1201", "hip", "rdna", 32, 64 * _KIB, 64),
    Arch("interpreter", "none", "interpreter", 1, 1 << 40, 1),
)

ARCHS: Final[dict[str, Arch]] = {arch.name: arch for arch in _TABLE}
"""Every architecture that the kernels are compiled for, and the interpreter."""

CHECKED: Final[dict[Vendor, tuple[str, ...]]] = {
    "cuda": ("sm_80", "sm_90", "sm_100"),
    "hip": ("gfx90a", "gfx942", "gfx950", "gfx1100"),
}
"""Architectures that every change is compiled for, by vendor; the others are on request."""

INTERPRETER: Final = ARCHS["interpreter"]


def arch_named(name: str) -> Arch:
    """Returns an architecture by name; suffixes such as "gfx942:sramecc+" are ignored.

    Raises:
      Unsupported: the kernels are not prepared for it.
    """
    found = ARCHS.get(name.split(":")[0].removesuffix("a"), ARCHS.get(name.split(":")[0]))
    if found is None:
        known = ", ".join(name for name in ARCHS if name != "interpreter")
        raise Unsupported("attention", name, f"the Triton kernels are prepared for {known}")
    return found
