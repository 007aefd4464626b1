"""Compiling through the real wrappers without a device.

Triton asks its active driver for the target and then launches. This driver names any target, and
`JITFunction.run` is made to stop after compiling. Every launch of a wrapper is then specialised
exactly as it would be at run time, compiled to a cubin or hsaco, and recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from leadframe.errors import ConfigError
from leadframe_triton.arch import ARCHS, Arch

_DEVICE_INDEX = {name: index for index, name in enumerate(ARCHS)}
"""A device index per architecture: Triton caches the compiler backend by index."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch.

    Attributes:
      kernel: the kernel function's name.
      compiled: Triton's `CompiledKernel`.
      options: the keyword arguments of the launch: block sizes and compiler options.
      is_new: this launch compiled; False is a hit of the in-process cache.
    """

    kernel: str
    compiled: Any
    options: dict[str, Any]
    is_new: bool


@dataclass(slots=True)
class Recorder:
    """What `compile_only` hands out: the launches so far, in order."""

    launches: list[Launch] = field(default_factory=list)

    def take(self) -> list[Launch]:
        """Returns the launches since the last call and forgets them."""
        taken, self.launches = self.launches, []
        return taken


class CompileOnlyDriver:
    """A Triton driver of a device that is not there."""

    def __init__(self, arch: Arch) -> None:
        self._target = GPUTarget(arch.vendor, arch.triton_arch, arch.warp_size)
        self._index = _DEVICE_INDEX[arch.name]

    def get_current_target(self) -> Any:
        """The target that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """An index of its own for each architecture."""
        return self._index

    def set_current_device(self, device: int) -> None:
        """Does nothing."""

    def get_current_stream(self, device: int) -> int:
        """The null stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where arguments live."""
        return torch.device("meta")


@contextmanager
def compile_only(arch: Arch) -> Iterator[Recorder]:
    """Makes every Triton launch in this process compile for `arch` and not run.

    Raises:
      ConfigError: Triton was imported for interpretation.
    """
    if triton.knobs.runtime.interpret:
        raise ConfigError("compile-check needs the compiler: unset TRITON_INTERPRET and try again")
    recorder, run = Recorder(), JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        cache = self.device_caches[_DEVICE_INDEX[arch.name]][0]
        before = len(cache)
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        recorder.launches.append(Launch(name, compiled, options, len(cache) > before))
        return compiled

    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(CompileOnlyDriver(arch))
    JITFunction.run = record
    try:
        yield recorder
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = previous
