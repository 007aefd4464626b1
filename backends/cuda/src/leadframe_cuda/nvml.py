"""NVIDIA GPUs as the driver's management library tells them: no CUDA context, no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from leadframe.platform.info import Device
from leadframe_triton.plugin import Found, environment_mask, visible

_LIBRARY: Final = "libnvidia-ml.so.1"
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_TEXT_BYTES: Final = 96


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class NvmlError(Exception):
    """A call of the library did not return success."""


def load_nvml() -> Any:
    """Loads the library that comes with the driver.

    Raises:
      OSError: it is not installed.
    """
    return ctypes.CDLL(_LIBRARY)


def find(
    env: Mapping[str, str], load: Callable[[], Any] = load_nvml, driver: Path = _DRIVER
) -> Found:
    """Lists the GPUs that this process may see.

    Args:
      env: the environment, for `CUDA_VISIBLE_DEVICES`.
      load: loads the library.
      driver: exists when the kernel driver is loaded.
    """
    try:
        library = load()
    except OSError:
        loaded = "is loaded" if driver.exists() else "is not loaded"
        return Found((), f"no NVIDIA GPU: {_LIBRARY} is not installed and the driver {loaded}")
    try:
        with _initialised(library):
            listed = list(_devices(library))
    except NvmlError as error:
        return Found((), f"no NVIDIA GPU: {error}")
    if not listed:
        return Found((), "no NVIDIA GPU: the driver is loaded and lists none")
    mask = environment_mask(env, "CUDA_VISIBLE_DEVICES")
    devices = visible([device for device, _ in listed], mask, [uuid for _, uuid in listed])
    if not devices:
        return Found((), f"CUDA_VISIBLE_DEVICES={mask} hides all {len(listed)} NVIDIA GPUs")
    return Found(devices)


@contextmanager
def _initialised(library: Any) -> Iterator[None]:
    _check(library, "nvmlInit_v2", library.nvmlInit_v2())
    try:
        yield
    finally:
        library.nvmlShutdown()


def _devices(library: Any) -> Iterator[tuple[Device, str]]:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
        pointers = ctypes.byref(major), ctypes.byref(minor)
        _call(library, "nvmlDeviceGetCudaComputeCapability", handle, *pointers)
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        name, uuid = (
            _text(library, function, handle)
            for function in ("nvmlDeviceGetName", "nvmlDeviceGetUUID")
        )
        arch = f"sm_{major.value}{minor.value}"
        yield Device(index, name, memory.total, arch), uuid


def _text(library: Any, function: str, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, function, handle, buffer, _TEXT_BYTES)
    return buffer.value.decode(errors="replace")


def _call(library: Any, function: str, *arguments: Any) -> None:
    _check(library, function, getattr(library, function)(*arguments))


def _check(library: Any, function: str, status: int) -> None:
    if not status:
        return
    library.nvmlErrorString.restype = ctypes.c_char_p
    text = library.nvmlErrorString(status)
    message = text.decode(errors="replace") if isinstance(text, bytes) else f"status {status}"
    raise NvmlError(f"{function}: {message}")
