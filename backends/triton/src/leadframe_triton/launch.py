"""How kernels are launched: options that every launch sets, and who chooses tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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


class CurrentDevice:
    """Makes one GPU the calling thread's current one.

    Triton launches on the current device, wherever its tensors are, and each thread has its own:
    an engine's thread starts on GPU 0 whatever the thread that built the backend had chosen.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._module: Any = torch.get_device_module(device)

    def __call__(self) -> None:
        """Sets it, unless it is."""
        if self._module.current_device() != self._index:
            self._module.set_device(self._index)


def current_device(device: torch.device) -> Callable[[], None]:
    """What to call before a launch on a device; nothing is to be done on the host."""
    return _nothing if device.type == "cpu" else CurrentDevice(device)


def _nothing() -> None:
    """The interpreter has no device."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What every wrapper of this package is bound to.

    Attributes:
      arch: the chip that kernels are compiled for.
      num_cores: SMs or CUs of the device; 0 takes the architecture's.
      choose_tile: who picks the attention tiles.
      split_tokens: keys that one program of split decode takes in batch-invariant mode; 0
        splits by what the bucket needs to fill the device.
      make_current: called before every launch; see `CurrentDevice`.
    """

    arch: Arch
    num_cores: int = 0
    choose_tile: TileChooser = field(default=default_tile)
    split_tokens: int = 0
    make_current: Callable[[], None] = _nothing

    @property
    def cores(self) -> int:
        """SMs or CUs to fill."""
        return self.num_cores or self.arch.num_cores

    def options(self, num_warps: int = 4, num_stages: int = 1, waves: int = 0) -> dict[str, int]:
        """Launch options of one kernel, which is launched next.

        Fused multiply-add is set, since Triton's default changes; but not inside torch.compile,
        whose own launches know fewer options, and choose the device themselves.
        """
        options: dict[str, int] = {"num_warps": num_warps, "num_stages": num_stages}
        if not torch.compiler.is_compiling():
            self.make_current()
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
