"""How kernels are launched: options that every launch sets, and who chooses tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from leadframe_triton.arch import Arch
from leadframe_triton.tiles import Kind, Tile, tiles_for


class TileKey(NamedTuple):
    """What the choice of a tile may depend on: constants of a model, never lengths.

    Attributes:
      kind: which attention kernel.
      head_dim: elements a head.
      group: query heads a KV head.
      element_bytes: bytes an element of q.
      block_size: tokens a block.
      windowed: whether the layer has a sliding window.
    """

    kind: Kind
    head_dim: int
    group: int
    element_bytes: int
    block_size: int
    windowed: bool = False


class TileChooser(Protocol):
    """Chooses the tile of an attention kernel."""

    def __call__(self, arch: Arch, key: TileKey) -> Tile:
        """Returns a tile from `tiles_for`; the same one for the same key, always."""


def default_tile(arch: Arch, key: TileKey) -> Tile:
    """The first configuration of the architecture's table."""
    return tiles_for(arch, key.kind, key.head_dim, key.element_bytes)[0]


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What every wrapper of this package is bound to.

    Attributes:
      arch: the chip that kernels are compiled for.
      num_cores: SMs or CUs of the device; 0 takes the architecture's.
      choose_tile: who picks the attention tiles.
      split_tokens: keys that one program of split decode takes in batch-invariant mode; 0
        splits by what the bucket needs to fill the device.
    """

    arch: Arch
    num_cores: int = 0
    choose_tile: TileChooser = field(default=default_tile)
    split_tokens: int = 0

    @property
    def cores(self) -> int:
        """SMs or CUs to fill."""
        return self.num_cores or self.arch.num_cores

    def options(self, num_warps: int = 4, num_stages: int = 1, waves: int = 0) -> dict[str, int]:
        """Launch options of one kernel.

        Fused multiply-add is set, since Triton's default changes; but not inside torch.compile,
        whose own launches know fewer options.
        """
        options: dict[str, int] = {"num_warps": num_warps, "num_stages": num_stages}
        if not torch.compiler.is_compiling():
            options["enable_fp_fusion"] = True
        if waves and self.arch.vendor == "hip":
            options["waves_per_eu"] = waves
        return options

    def warps(self, elements: int) -> int:
        """Warps for a program over `elements`, about 8 elements a thread."""
        wanted = elements // (8 * max(self.arch.warp_size, 32))
        return max(1, min(16, 1 << max(wanted, 1).bit_length() - 1))


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
