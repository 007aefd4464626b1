"""Tile sizes of the attention kernels, per family of chips. Nothing here imports Triton.

The first configuration of an entry is the default; the others are what tuning may choose. Every
one of them is compiled for every architecture of its family by `leadframe compile-check`, which
refuses spills, too much shared memory and lost matrix instructions.

A key's address comes from the block table, so that a loop reads two loads ahead: it takes three
stages to have one iteration's keys on their way while the last one's are used. With two, the table
is waited for in every iteration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal

from leadframe_triton.arch import Arch

Kind = Literal["ragged", "decode"]


@dataclass(frozen=True, slots=True)
class Tile:
    """How one attention kernel is launched.

    Attributes:
      block_m: rows of a query tile: tokens times the query heads of a KV head.
      block_n: keys a loop iteration.
      num_warps: warps a program.
      num_stages: depth of the software pipeline over keys.
      waves_per_eu: AMD's occupancy hint; 0 leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0

    def __str__(self) -> str:
        extra = f" eu{self.waves_per_eu}" if self.waves_per_eu else ""
        return f"m{self.block_m} n{self.block_n} w{self.num_warps} s{self.num_stages}{extra}"

    def as_dict(self) -> dict[str, int]:
        """The fields, for JSON."""
        return asdict(self)


_Entry = tuple[int, tuple[Tile, ...]]
"""(largest head dim, configurations); the first entry that is large enough applies."""

_HALF: Final[dict[tuple[str, Kind], tuple[_Entry, ...]]] = {
    ("ampere", "ragged"): (
        (64, (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3))),
        (128, (Tile(128, 64, 8, 3), Tile(64, 64, 8, 3))),
        (256, (Tile(64, 32, 8, 3),)),
    ),
    ("ampere", "decode"): (
        (64, (Tile(16, 64, 4, 3), Tile(16, 128, 4, 3))),
        (96, (Tile(16, 64, 4, 3),)),
        (128, (Tile(16, 64, 4, 5), Tile(16, 64, 4, 3))),
        (256, (Tile(16, 32, 4, 5), Tile(16, 64, 4, 3))),
    ),
    ("ada", "ragged"): (
        (64, (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3))),
        (128, (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3))),
        (256, (Tile(64, 32, 8, 3), Tile(32, 32, 4, 3))),
    ),
    ("ada", "decode"): (
        (64, (Tile(16, 64, 4, 3), Tile(16, 128, 4, 3))),
        (128, (Tile(16, 32, 4, 3), Tile(16, 64, 4, 3))),
        (256, (Tile(16, 32, 4, 3), Tile(16, 16, 4, 3))),
    ),
    ("hopper", "ragged"): (
        (64, (Tile(128, 128, 8, 3), Tile(128, 64, 8, 5), Tile(64, 64, 4, 3))),
        (96, (Tile(128, 64, 8, 5), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3))),
        (128, (Tile(128, 64, 8, 5), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3))),
        (256, (Tile(64, 32, 8, 3), Tile(64, 64, 8, 3))),
    ),
    ("hopper", "decode"): (
        (64, (Tile(16, 64, 4, 5), Tile(16, 128, 4, 3))),
        (96, (Tile(16, 64, 4, 3),)),
        (128, (Tile(16, 64, 4, 5), Tile(16, 64, 4, 3), Tile(16, 128, 8, 3))),
        (256, (Tile(16, 32, 4, 5), Tile(16, 64, 4, 3))),
    ),
    ("blackwell", "ragged"): (
        (64, (Tile(128, 128, 8, 3), Tile(64, 64, 4, 3))),
        (128, (Tile(128, 64, 8, 5), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3))),
        (256, (Tile(64, 32, 8, 3), Tile(64, 64, 8, 3))),
    ),
    ("blackwell", "decode"): (
        (64, (Tile(16, 64, 4, 5), Tile(16, 128, 4, 3))),
        (96, (Tile(16, 64, 4, 3),)),
        (128, (Tile(16, 64, 4, 5), Tile(16, 64, 4, 3), Tile(16, 128, 8, 3))),
        (256, (Tile(16, 32, 4, 5), Tile(16, 64, 4, 3))),
    ),
    ("cdna", "ragged"): (
        (64, (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))),
        (128, (Tile(128, 32, 4, 3), Tile(64, 32, 4, 3))),
        (256, (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1))),
    ),
    ("cdna", "decode"): (
        (64, (Tile(16, 64, 4, 3), Tile(16, 64, 2, 3))),
        (128, (Tile(16, 32, 4, 3), Tile(16, 64, 4, 3))),
        (256, (Tile(16, 32, 4, 1), Tile(16, 16, 4, 3))),
    ),
    ("cdna4", "ragged"): (
        (64, (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))),
        (128, (Tile(128, 64, 4, 3), Tile(64, 32, 4, 3))),
        (256, (Tile(64, 32, 4, 3), Tile(32, 32, 4, 3))),
    ),
    ("cdna4", "decode"): (
        (64, (Tile(16, 64, 4, 3), Tile(16, 128, 4, 3))),
        (128, (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3))),
        (256, (Tile(16, 32, 4, 3), Tile(16, 64, 8, 3))),
    ),
    ("rdna", "ragged"): (
        (64, (Tile(64, 32, 4, 1), Tile(64, 32, 8, 1))),
        (128, (Tile(64, 16, 8, 1), Tile(32, 16, 4, 1))),
        (256, (Tile(16, 16, 16, 1),)),
    ),
    ("rdna", "decode"): (
        (64, (Tile(16, 32, 4, 1), Tile(16, 32, 8, 1))),
        (128, (Tile(16, 16, 4, 1), Tile(16, 16, 2, 1))),
        (256, (Tile(16, 16, 16, 1),)),
    ),
    ("interpreter", "ragged"): ((256, (Tile(64, 64, 4, 1),)),),
    ("interpreter", "decode"): ((256, (Tile(16, 64, 4, 1),)),),
}

_WIDE: Final[dict[tuple[str, Kind], tuple[_Entry, ...]]] = {
    ("cuda", "ragged"): ((64, (Tile(16, 16, 4, 1),)), (256, (Tile(16, 16, 8, 1),))),
    ("cuda", "decode"): ((256, (Tile(16, 16, 8, 2),)),),
    ("other", "ragged"): ((64, (Tile(16, 16, 4, 1),)), (256, (Tile(16, 16, 8, 1),))),
    ("other", "decode"): ((256, (Tile(16, 16, 8, 1),)),),
}
"""float32, by vendor: exact products without matrix units, for tests and small models."""

MAX_HEAD_DIM: Final = 256


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a head is padded to inside a kernel."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles_for(arch: Arch, kind: Kind, head_dim: int, element_bytes: int) -> tuple[Tile, ...]:
    """Returns the configurations of a kernel, the default first.

    Args:
      arch: the chip.
      kind: which kernel.
      head_dim: elements a head, at most `MAX_HEAD_DIM`.
      element_bytes: bytes an element of q.
    """
    entries = _HALF[arch.family, kind]
    if element_bytes > 2 and arch.family != "interpreter":
        entries = _WIDE["cuda" if arch.vendor == "cuda" else "other", kind]
    return next(tiles for largest, tiles in entries if head_dim <= largest)
