"""Every error that Leadframe raises on purpose.

::

    LeadframeError
    ├── ConfigError              a flag, a file or an environment variable is wrong
    ├── ModelError               the model cannot be served
    │   ├── ModelNotFound        no model at that path
    │   ├── CheckpointError      a weight file is missing, truncated or inconsistent
    │   └── UnsupportedModel     an architecture or a config field we do not implement
    ├── RequestError             one request is wrong; the HTTP layer answers 400
    │   ├── PromptTooLong
    │   └── QueueFull            answers 503
    ├── EngineDead               the engine stopped; every later call gets this
    ├── InternalError            an invariant of the core is broken: a bug in Leadframe
    └── PlatformError            something about a device or its plugin
        ├── PluginLoadError      an entry point could not be imported or registered
        ├── ContractViolation    a plugin or backend breaks the contract; lists every problem
        ├── IncompatibleContract written for another contract version
        ├── DeviceNotFound       the named device is not present
        │   └── PlatformNotInstalled  no plugin of that name is installed
        ├── AmbiguousDevice      `auto` found several accelerators
        ├── Unsupported          a capability is absent, with the backend's own reason
        ├── DeviceOOM            out of device memory
        ├── CompileError         a step did not compile for a bucket
        ├── DeviceLost           the device stopped answering
        └── BackendBug           a backend raised something that is not in this tree

Messages follow one order: what failed, the value, the limit, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


def shown(value: object, holder: str = "") -> str:
    """Returns a value as messages show it: its repr in at most 64 characters.

    Args:
      value: anything.
      holder: goes before "a very large integer", which stands for what Python does not write.
    """
    try:
        text = repr(value)
    except ValueError:  # it writes no integer of over 4,300 digits
        text = f"{holder}a very large integer"
    return text if len(text) <= 64 else text[:61] + "..."


class LeadframeError(Exception):
    """Root of the tree.

    Attributes:
      exit_code: the process exit status when this error ends a command.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(LeadframeError):
    """A setting is unknown, out of range or contradicts another one."""

    exit_code = 2


class ModelError(LeadframeError):
    """The model cannot be loaded or served."""

    exit_code = 3


class ModelNotFound(ModelError):
    """Nothing that looks like a model is at the given path."""


class CheckpointError(ModelError):
    """A weight file is missing, truncated, or does not cover the model."""


class UnsupportedModel(ModelError):
    """The architecture, or a config field that changes the mathematics, is not implemented."""


class RequestError(LeadframeError):
    """One request is invalid. Nothing else is affected.

    Attributes:
      param: the request field at fault, when one is.
      status: the HTTP status that the server answers with.
    """

    status: ClassVar[int] = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or prompt plus `max_tokens`, does not fit the context or the KV pool."""


class QueueFull(RequestError):
    """The waiting queue is at its limit; try again later."""

    status = 503


class EngineDead(LeadframeError):
    """The engine loop has stopped; the cause is chained."""

    exit_code = 4


class InternalError(LeadframeError):
    """An invariant of the core does not hold. Never a user's mistake; please report it."""

    exit_code = 5


class PlatformError(LeadframeError):
    """Something about a device, or about the plugin that provides it."""

    exit_code = 10


class PluginLoadError(PlatformError):
    """A plugin could not be imported or registered."""

    exit_code = 11


class ContractViolation(PlatformError):
    """A plugin or a backend does not follow the contract.

    Attributes:
      problems: every problem found, not only the first.
    """

    exit_code = 12

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{subject} does not follow the platform contract:\n{lines}")


class IncompatibleContract(PlatformError):
    """A plugin was written for a contract version that this core does not serve."""

    exit_code = 13


class DeviceNotFound(PlatformError):
    """The plugin of the named device is installed and finds no such device."""

    exit_code = 14


class PlatformNotInstalled(DeviceNotFound):
    """No installed distribution provides the named device."""

    exit_code = 21


class AmbiguousDevice(PlatformError):
    """`auto` found more than one accelerator, or two distributions claim one name."""

    exit_code = 15


class Unsupported(PlatformError):
    """The backend cannot run an op for a given specification.

    Attributes:
      op: the op that was asked for.
      spec: what it was asked to do.
      reason: the backend's own words.
    """

    exit_code = 16

    def __init__(self, op: str, spec: object, reason: str) -> None:
        self.op, self.spec, self.reason = op, spec, reason
        super().__init__(f"{op} is not supported for {spec}: {reason}")


class DeviceOOM(PlatformError):
    """Out of device memory.

    Attributes:
      requested: bytes that were asked for.
      free: bytes that were free, as far as the backend knows.
      phase: what was being done: "load", "profile", "compile", "kv", "step".
    """

    exit_code = 17

    def __init__(self, requested: int, free: int, phase: str) -> None:
        self.requested, self.free, self.phase = requested, free, phase
        super().__init__(
            f"out of device memory during {phase}: {requested:,} bytes asked, {free:,} free; "
            "lower --gpu-memory-utilization, --max-model-len or --max-num-seqs"
        )


class CompileError(PlatformError):
    """A step could not be compiled for a bucket."""

    exit_code = 18

    def __init__(self, bucket: object, reason: str) -> None:
        self.bucket = bucket
        super().__init__(f"compiling the step for {bucket} failed: {reason}")


class DeviceLost(PlatformError):
    """The device stopped answering; nothing on it can be trusted."""

    exit_code = 19


class BackendBug(PlatformError):
    """A backend raised an exception that the contract does not name.

    Attributes:
      member: the `Backend` member or op that raised.
    """

    exit_code = 20

    def __init__(self, member: str, cause: BaseException) -> None:
        self.member = member
        super().__init__(f"backend member {member!r} raised {type(cause).__name__}: {cause}")
        self.__cause__ = cause
