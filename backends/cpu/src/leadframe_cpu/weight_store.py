"""Which packed form each weight takes, and one copy of weights that a model uses twice."""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from leadframe.platform.backend import BlockWeightSource, WeightBlocks, WeightSource
from leadframe_cpu.packed import Format, PackedWeight, Packer
from leadframe_torch.dtypes import torch_dtype

Source = npt.NDArray[Any] | WeightSource
Index = tuple[slice, ...]

_BLOCK_FORMATS: Final = {
    (4, "float16", 32): Format.INT4_F16,
    (4, "float32", 32): Format.INT4_F32,
    (8, "float16", 32): Format.INT8_F16,
    (8, "float32", 32): Format.INT8_F32,
    (8, "float32", 16): Format.INT8_F32_B16,
}
"""(bits, type of scales, columns a block) → format."""


class WeightStore:
    """Packs weights for `linear` and `embed`.

    A tied head comes twice, from one source: it is packed once and shared while it lives.
    """

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        # the source is held with its id, so that the id stays its own
        self._shared: dict[tuple[int, str, str], tuple[Source, weakref.ref[PackedWeight]]] = {}

    def pack(
        self, source: Source, dtype: str, index: Index | None = None
    ) -> tuple[PackedWeight, bool]:
        """Packs a matrix, and tells whether that made a new one.

        Args:
          source: an array or a weight that has not been read.
          dtype: the element type that it stands for.
          index: the part to read; None packs all of it.
        """
        if isinstance(source, np.ndarray):
            part = source if index is None else source[index]
            return self._packer.pack_plain(part, torch_dtype(dtype)), True
        key = (id(source), dtype, repr(index))
        known = self._shared.get(key)
        found = known[1]() if known is not None else None
        if found is not None:
            return found, False
        made = self._pack_source(source, torch_dtype(dtype), index)
        self._shared[key] = (source, weakref.ref(made))
        return made, True

    def forget(self) -> None:
        """Lets go of the sources: loading is over."""
        self._shared.clear()

    def _pack_source(
        self, source: WeightSource, dtype: torch.dtype, index: Index | None
    ) -> PackedWeight:
        if isinstance(source, BlockWeightSource):
            blocks = source.read_blocks(index)
            layout = None if blocks is None else block_format(blocks)
            if blocks is not None and layout is not None:
                return self._packer.pack_blocks(blocks, layout, dtype)
        return self._packer.pack_plain(source.read(index), dtype)


def block_format(blocks: WeightBlocks) -> Format | None:
    """Returns the format that holds such blocks without loss, or None."""
    size = blocks.values.shape[1] // blocks.scale.shape[1]
    return _BLOCK_FORMATS.get((blocks.bits, blocks.scale.dtype.name, size))
