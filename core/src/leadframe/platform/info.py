"""Values that the hooks of a plugin receive and return. Plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leadframe.platform.version import CONTRACT

PlatformKind = Literal["accelerator", "host", "test"]
"""Who may be chosen by `auto`: an accelerator, or else the host; never a test platform."""


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """What a plugin is. Static: building it must not import an array library.

    Attributes:
      name: the `--device` value; equals the entry-point name.
      summary: one line for `leadframe devices`.
      contract: the contract version that the plugin was written for, as a literal.
      min_contract: the oldest core contract that it runs on, as a literal.
      distribution: the distribution that `pip` knows.
      version: that distribution's version.
      kind: "accelerator" may be chosen by `auto`; "host" is what `auto` falls to when no
        accelerator is present; "test" is only used when named.
    """

    name: str
    summary: str
    contract: tuple[int, int]
    min_contract: tuple[int, int]
    distribution: str
    version: str
    kind: PlatformKind = "accelerator"


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a platform.

    Attributes:
      index: what follows the colon in `--device NAME:INDEX`.
      name: the vendor's product name.
      memory_bytes: total memory, when it is known without creating a context.
      arch: the vendor's architecture name, such as "sm_90"; empty when there is none.
    """

    index: int
    name: str
    memory_bytes: int | None = None
    arch: str = ""


@dataclass(frozen=True, slots=True)
class Detection:
    """What `platform_detect` found.

    Attributes:
      devices: the devices that are present; empty when there is none.
      reason: one line for people, in both cases.
    """

    devices: tuple[Device, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine will ask of a backend, known before it is created.

    Attributes:
      max_num_seqs: rows in the largest batch.
      max_num_batched_tokens: tokens in the largest batch.
      max_model_len: tokens in the longest sequence; None while it is not known.
      memory_fraction: share of the device's memory that the engine may use, (0, 1].
      tensor_parallel_size: devices that share one model.
      rank: which of them this backend serves, counted from the device that was chosen; for
        backends with `Capabilities.rank_processes`.
      rendezvous: a directory of this user alone, through which the backends of a group find each
        other; empty for one device.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    memory_fraction: float = 0.9
    tensor_parallel_size: int = 1
    rank: int = 0
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One `-o KEY=VALUE` option of a platform.

    Attributes:
      name: the KEY.
      type: converts and checks the text; raises ValueError for a bad one.
      default: the value when the option is not given.
      help: one line for `leadframe devices -v`.
      choices: the only values allowed, when they are enumerable.
    """

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class KernelImpl:
    """One extra implementation of an op for an existing platform.

    Attributes:
      op: the op's name.
      name: what a user writes in `--op OP=NAME`.
      fn: called as the op's signature says; gets the backend's arrays.
      why_not: given an `OpSpec`, a reason why it cannot serve it, or None.
      priority: above 0 comes before the platform's own op, below 0 after it.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    why_not: Callable[[Any], str | None] = lambda spec: None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ConformanceNotes:
    """What a plugin tells the conformance kit about itself. Every entry carries its reason.

    Attributes:
      unsupported: test-id pattern → reason; permanent, and must agree with the capabilities.
      expected_failures: test-id pattern → reason; temporary, and passing is a failure.
      tolerances: "op" or "op/dtype" → (relative tolerance, reason).
    """

    unsupported: Mapping[str, str] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, tuple[float, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory, in bytes.

    Attributes:
      total: what this process may use: the device, or the cgroup limit on a host.
      free: what could be allocated now.
      used: what this backend holds now.
      peak: the most it has held since it was created.
    """

    total: int
    free: int
    used: int
    peak: int


def contract_text(version: Sequence[int] = CONTRACT) -> str:
    """Returns a contract version as people write it, such as "1.0"."""
    return ".".join(str(part) for part in version)
