"""The array namespace of torch backends: what reference ops run over."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import array_api_compat.torch as compat
import torch

from leadframe.platform.namespace import ArrayNamespace

_CREATION = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")


def torch_namespace(device: torch.device) -> ArrayNamespace:
    """Returns the array API over torch, creating on `device`, with `put` and `top_k`."""
    base: Any = compat
    if device.type != "cpu":
        created = {name: partial(getattr(compat, name), device=device) for name in _CREATION}
        base = _Overlay(**created)
    return ArrayNamespace(base, put=_put, top_k=_top_k)


class _Overlay(SimpleNamespace):
    """Attributes given to the constructor first, then those of the compat namespace."""

    def __getattr__(self, name: str) -> Any:
        return getattr(compat, name)


def _put(
    buf: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return buf.index_put_((rows.long(), cols.long()), values)


def _top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(x, k, dim=-1)
    return values, indices.to(torch.int32)
