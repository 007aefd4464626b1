"""Element types between the contract's names, torch and NumPy, bfloat16 included."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from leadframe.errors import Unsupported

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Contract name → torch dtype."""


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a contract name.

    Raises:
      Unsupported: torch arrays cannot hold it.
    """
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        known = ", ".join(TORCH_DTYPES)
        raise Unsupported("upload", name, f"torch backends hold {known}") from None


def from_host(array: npt.NDArray[Any]) -> torch.Tensor:
    """Copies a NumPy array, of ml_dtypes' bfloat16 too, into a new tensor on the host.

    The copy is always made: the source may be a read-only memory map, or change later.
    """
    dtype = torch_dtype(array.dtype.name)
    tensor = torch.empty(array.shape, dtype=dtype)
    if dtype == torch.bfloat16:
        # NumPy sees bfloat16 only through ml_dtypes, and torch does not know that package
        np.copyto(tensor.view(torch.int16).numpy(), array.view(np.int16))
    else:
        np.copyto(tensor.numpy(), array)
    return tensor


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Copies a tensor into a new NumPy array; bfloat16 becomes float32."""
    host = tensor.detach()
    if host.dtype == torch.bfloat16:
        host = host.to(torch.float32)
    result: npt.NDArray[Any] = host.to("cpu", copy=True).contiguous().numpy()
    return result


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of zeros; on a host the system hands its pages out when they are written.

    A KV cache of gigabytes then costs no time at start-up, and no memory before it is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).reshape(shape)
