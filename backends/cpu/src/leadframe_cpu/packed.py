"""Weights in panels: the form that the native `linear` and `embed` read.

Every format is lossless. A float32 model whose checkpoint holds bfloat16, or blocks of small
integers, keeps them as they are: the kernels turn them into the same float32 weights while they
multiply, so that decoding one token reads a fraction of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

from leadframe.platform.backend import WeightBlocks
from leadframe_cpu.library import Kernel, Library
from leadframe_torch.dtypes import from_host

_LINE: Final = 64
"""Bytes that follow a buffer: kernels prefetch past its end, never read."""


class Format(IntEnum):
    """How a packed weight stores its elements; the numbers are those of native/formats.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8_F16 = 3
    INT8_F32 = 4
    INT8_F32_B16 = 5
    INT4_F16 = 6
    INT4_F32 = 7


_PLAIN: Final = {"float32": Format.F32, "bfloat16": Format.BF16, "float16": Format.F16}

_WITH_OFFSET: Final = frozenset(
    {Format.INT8_F32, Format.INT8_F32_B16, Format.INT4_F16, Format.INT4_F32}
)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PackedWeight:
    """A matrix [rows, columns] in panels.

    Attributes:
      data: uint8, the panels.
      layout: how elements are stored.
      shape: (rows, columns): outputs and inputs of `linear`.
      dtype: the element type that it stands for.
    """

    data: Tensor
    layout: Format
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        return self.data.numel()


class Packer:
    """Turns matrices into panels and back."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pack = Kernel(library, "lf_pack", "7q", is_long=True)
        self._read = Kernel(library, "lf_read_rows", "8q", is_long=True)

    def pack_plain(self, host: npt.NDArray[Any], dtype: torch.dtype) -> PackedWeight:
        """Packs a matrix of float32, bfloat16 or float16 that stands for `dtype`."""
        tensor = from_host(host)
        if dtype == torch.bfloat16:
            tensor = tensor.to(dtype)
        elif tensor.dtype == torch.float64:
            tensor = tensor.float()
        if tensor.dtype == torch.float32 and _is_truncated(tensor):
            tensor = tensor.to(torch.bfloat16)
        layout = _PLAIN[str(tensor.dtype).removeprefix("torch.")]
        return self._packed(layout, dtype, tensor, None, None)

    def pack_blocks(self, blocks: WeightBlocks, layout: Format, dtype: torch.dtype) -> PackedWeight:
        """Packs integers with their scales and offsets as they are."""
        values, scale = from_host(blocks.values), from_host(blocks.scale)
        offset = None if blocks.offset is None else from_host(blocks.offset)
        if offset is None and layout in _WITH_OFFSET:
            offset = torch.zeros_like(scale)
        if offset is not None and layout not in _WITH_OFFSET:
            scale, offset, layout = scale.float(), offset.float(), Format.INT8_F32
        return self._packed(layout, dtype, values, scale, offset)

    def _packed(
        self,
        layout: Format,
        dtype: torch.dtype,
        values: Tensor,
        scale: Tensor | None,
        offset: Tensor | None,
    ) -> PackedWeight:
        rows, columns = values.shape
        size = self._library.packed_bytes(layout, rows, columns)
        data = torch.empty(size + _LINE, dtype=torch.uint8)
        self._library.advise_huge(data.data_ptr(), size)
        sides = [0 if side is None else side.data_ptr() for side in (values, scale, offset)]
        self._pack(self._pack.pack(*sides, data.data_ptr(), layout, rows, columns))
        return PackedWeight(data, layout, (rows, columns), dtype)

    def rows(self, weight: PackedWeight, ids: Tensor | None, out: Tensor) -> Tensor:
        """Reads rows of a packed matrix into `out` [N, columns], in out's type.

        Args:
          weight: the matrix.
          ids: int32 [N], clamped; None reads all rows in order.
          out: float32 or bfloat16.
        """
        self._read(self.pack_rows(weight, ids, out))
        return out

    def pack_rows(self, weight: PackedWeight, ids: Tensor | None, out: Tensor) -> bytes:
        """Returns the arguments of the kernel behind `rows`."""
        rows, columns = weight.shape
        source = 0 if ids is None else ids.data_ptr()
        return self._read.pack(
            weight.data.data_ptr(),
            source,
            out.data_ptr(),
            weight.layout,
            rows,
            columns,
            out.shape[0],
            out.dtype == torch.bfloat16,
        )

    @property
    def read_kernel(self) -> Kernel:
        """The kernel behind `rows`."""
        return self._read

    def unpack(self, weight: PackedWeight) -> Tensor:
        """Returns the plain matrix."""
        return self.rows(weight, None, torch.empty(weight.shape, dtype=weight.dtype))


def _is_truncated(tensor: Tensor) -> bool:
    """Whether every float32 is exactly a bfloat16, as in checkpoints that were widened once."""
    bits = tensor.contiguous().view(torch.int32).numpy()
    # most matrices show it in their first row
    return not (bits[0] & 0xFFFF).any() and not (bits & 0xFFFF).any()
