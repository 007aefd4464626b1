"""A loaded plugin as typed methods: the only code that calls hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pluggy

from leadframe.errors import BackendBug, ContractViolation, LeadframeError
from leadframe.platform.info import (
    ConformanceNotes,
    Detection,
    Device,
    KernelImpl,
    Limits,
    OptionSpec,
    PlatformInfo,
)
from leadframe.platform.negotiation import check_contract
from leadframe.platform.ops import OP_NAMES
from leadframe.platform.timeout import detect_timeout, run_with_timeout
from leadframe.platform.validate import check_info, kernel_problems
from leadframe.platform.version import CONTRACT

_Result = TypeVar("_Result")

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_HARMLESS_FOLDERS = ("/dev/pts/", "/dev/shm/", "/dev/fd/", "/dev/mqueue/")


class Plugin:
    """One plugin. Every method calls one hook and checks what it returns.

    Attributes:
      name: the entry point's name.
      distribution: the distribution that provides it.
      version: that distribution's version.
    """

    def __init__(
        self, name: str, distribution: str, version: str, manager: pluggy.PluginManager
    ) -> None:
        self.name, self.distribution, self.version = name, distribution, version
        self._manager = manager
        self._info: PlatformInfo | None = None

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"

    @property
    def manager(self) -> pluggy.PluginManager:
        """The plugin's own manager, for those who watch hook calls."""
        return self._manager

    def info(self, *, is_platform: bool = True) -> PlatformInfo:
        """Says what the plugin is, once it is known to serve this core's contract.

        Args:
          is_platform: False for plugins that only offer kernels; their name is free.

        Raises:
          ContractViolation: the answer is malformed.
          IncompatibleContract: it was written for another contract.
        """
        if self._info is None:
            info = self._one("platform_info", PlatformInfo)
            problems = check_info(info, self.name if is_platform else None, self.distribution)
            if problems:
                raise ContractViolation(str(self), problems)
            check_contract(info)
            self._info = info
        return self._info

    def detect(self, env: Mapping[str, str], timeout: float | None = None) -> Detection:
        """Finds the devices that are present.

        Args:
          env: the environment; the hook gets a read-only view.
          timeout: seconds to wait; None takes `LEADFRAME_DETECT_TIMEOUT` or 2.

        Raises:
          ContractViolation: it raised, hung, opened a device or returned rubbish.
        """
        seconds = detect_timeout(env) if timeout is None else timeout
        with self._opens_no_device():
            found = run_with_timeout(
                lambda: self._one("platform_detect", Detection, env=MappingProxyType(dict(env))),
                seconds,
            )
        if found is None:
            problem = (
                f"platform_detect did not return within {seconds:g} s; mend or uninstall "
                f"{self.distribution}, or allow more with LEADFRAME_DETECT_TIMEOUT=SECONDS"
            )
            raise ContractViolation(str(self), [problem])
        return found

    def create(self, device: Device, options: Mapping[str, Any], limits: Limits) -> Any:
        """Builds the backend; the result is not checked yet.

        Raises:
          PlatformError: what the plugin raised.
          BackendBug: it raised something else.
        """
        hook = self._manager.hook.platform_create
        try:
            results = hook(device=device, options=options, limits=limits)
        except LeadframeError:
            raise
        except Exception as error:
            raise BackendBug(f"platform_create of {self.distribution}", error) from error
        return results[0] if results else None

    def options(self) -> tuple[OptionSpec, ...]:
        """Lists the options of the platform; empty when the hook is absent."""
        return self._many("platform_options", OptionSpec)

    def kernels(self, platform: str) -> tuple[KernelImpl, ...]:
        """Lists the kernels that the plugin offers for a platform.

        Raises:
          ContractViolation: one is for an op that does not exist, or cannot be called as it.
        """
        kernels = self._many("platform_kernels", KernelImpl, platform=platform)
        if self._info is not None and self._info.contract > CONTRACT:
            # a newer minor version may have ops that this core does not know
            kernels = tuple(kernel for kernel in kernels if kernel.op in OP_NAMES)
        problems = [problem for kernel in kernels for problem in kernel_problems(kernel)]
        if problems:
            raise ContractViolation(str(self), problems)
        return kernels

    def conformance(self) -> ConformanceNotes:
        """Returns what the plugin tells the conformance kit."""
        if not self._manager.hook.platform_conformance.get_hookimpls():
            return ConformanceNotes()
        return self._one("platform_conformance", ConformanceNotes)

    def _one(self, hook: str, kind: type[_Result], **arguments: Any) -> _Result:
        results = self._call(hook, arguments)
        value = results[0] if results else None
        if not isinstance(value, kind):
            problem = f"{hook} returned {type(value).__name__}, not {kind.__name__}"
            raise ContractViolation(str(self), [problem])
        return value

    def _many(self, hook: str, kind: type[_Result], **arguments: Any) -> tuple[_Result, ...]:
        results = self._call(hook, arguments)
        values: Any = results[0] if results else ()
        is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_sequence or not all(isinstance(value, kind) for value in values):
            problem = f"{hook} returned {values!r}, not a sequence of {kind.__name__}"
            raise ContractViolation(str(self), [problem])
        return tuple(values)

    def _call(self, hook: str, arguments: Mapping[str, Any]) -> list[Any]:
        caller: Callable[..., list[Any]] = getattr(self._manager.hook, hook)
        try:
            return caller(**arguments)
        except LeadframeError:
            raise
        except (Exception, SystemExit) as error:
            problem = f"{hook} raised {type(error).__name__}: {error}"
            raise ContractViolation(str(self), [problem]) from error

    @contextmanager
    def _opens_no_device(self) -> Iterator[None]:
        before = open_device_files()
        yield
        opened = sorted(open_device_files() - before)
        if opened:
            problem = (
                f"platform_detect left {', '.join(opened)} open: it must not create a device "
                "context, which would break processes that are forked later"
            )
            raise ContractViolation(str(self), [problem])


def open_device_files() -> frozenset[str]:
    """Returns the device files that this process holds open; empty where that cannot be known."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return frozenset()
    targets = set()
    for entry in folder.iterdir():
        try:
            targets.add(os.readlink(entry))
        except OSError:  # closed in between
            continue
    return frozenset(
        target
        for target in targets
        if target.startswith("/dev/")
        and target not in _HARMLESS
        and not target.startswith(_HARMLESS_FOLDERS)
    )


__all__ = ["Plugin", "open_device_files"]
