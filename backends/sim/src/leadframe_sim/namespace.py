"""NumPy's functions as kernels of the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat.numpy as xnp
import numpy as np

from leadframe.platform import ArrayNamespace
from leadframe.platform.reference.namespace import numpy_namespace
from leadframe_sim.device import SimArray, SimDevice

_HOST = numpy_namespace()


class _Kernels:
    """Every function of the namespace, launched on a device; dtypes and constants as they are."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        value = getattr(xnp, name)
        if isinstance(value, type) or not callable(value):
            return value
        return _kernel(self._device, value)


def _kernel(device: SimDevice, function: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        return device.launch(function, args, kwargs)

    return launch


def _put_copy(buf: Any, rows: Any, cols: Any, values: Any) -> Any:
    return _HOST.put(np.array(buf), rows, cols, values)


def sim_namespace(device: SimDevice) -> ArrayNamespace:
    """Returns the namespace of one device."""

    def put(buf: SimArray, rows: Any, cols: Any, values: Any) -> Any:
        kernel = _put_copy if device.functional else _HOST.put
        return device.launch(kernel, (buf, rows, cols, values), {})

    return ArrayNamespace(_Kernels(device), put=put, top_k=_kernel(device, _HOST.top_k))


__all__ = ["sim_namespace"]
