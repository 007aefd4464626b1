"""Settings, checked when they are built.

Frozen: what is measured later is returned, not written back.
The docstring of each field is its `--help` text.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from leadframe.errors import ConfigError, shown

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1


def check_types(settings: object) -> None:
    """Checks every field of a dataclass of settings against its annotation.

    Raises:
      ConfigError: a value is of another type; the message names the flag, the value and the type.
    """
    hints = typing.get_type_hints(type(settings))
    for each in fields(settings):  # type: ignore[arg-type]
        value, hint = getattr(settings, each.name), hints[each.name]
        if not _fits(value, hint):
            raise refusal(each.name, value, _described(hint))


def check_range(name: str, value: float | None, low: int, high: int) -> None:
    """Checks a number that is set.

    Raises:
      ConfigError: it is outside [low, high].
    """
    if value is not None and not low <= value <= high:
        raise refusal(name, value, f"at least {low}" if value < low else f"at most {high}")


def refusal(name: str, value: object, rule: str) -> ConfigError:
    """Returns the error for a setting: its flag, the value in at most 64 characters, the rule."""
    return ConfigError(f"--{name.replace('_', '-')} is {shown(value)}; it must be {rule}")


def _fits(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if hint is float:
        hint = int | float
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _described(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " or ".join(_described(each) for each in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Mapping:
        return f"a mapping of {_described(inner[0])} to {_described(inner[1])}"
    if origin is tuple:
        return f"a tuple, each entry {_described(inner[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
    return names.get(hint) or ("None" if hint is types.NoneType else f"a {hint.__name__}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How work is chosen each step.

    Attributes:
      max_num_seqs: Requests that may run at once.
      max_num_batched_tokens: Token budget of a step.
      enable_chunked_prefill: Split prompts that do not fit the budget over several steps.
      long_prefill_token_threshold: Most tokens of one prompt in a step while others are waiting
        or running; 0 means no such limit.
      policy: Order of the waiting queue: "fcfs", or "priority" (lower value first).
      max_num_queued_reqs: Waiting requests beyond which new ones are refused with 503; 0 means
        no limit.
      watermark: Fraction of blocks kept free when a request is admitted while others run.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int = 0
    watermark: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        check_types(self)
        check_range("max_num_seqs", self.max_num_seqs, 1, 2**16)
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        for name in ("long_prefill_token_threshold", "max_num_queued_reqs"):
            check_range(name, getattr(self, name), 0, _INT32)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than "
                f"--max-num-seqs, {self.max_num_seqs}: a decode of every running request must "
                "fit one step; raise the first or lower the second"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise refusal("watermark", self.watermark, "in [0, 1)")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much KV cache there is and how it is shared.

    Attributes:
      block_size: Tokens per block; without it, the backend's preferred size.
      gpu_memory_utilization: Share of the device's memory (on a host: of what the process may
        use) for weights, steps and KV together; without it, 0.9 on an accelerator and 0.5
        on a host.
      kv_cache_memory_bytes: Exact size of the KV cache; without it, what is left.
      enable_prefix_caching: Reuse the blocks of equal prefixes.
      kv_cache_dtype: Element type of the cache; "auto" is the model's.
      num_blocks_override: Exact number of blocks, for tests.
    """

    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    num_blocks_override: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        check_types(self)
        check_range("block_size", self.block_size, 1, 2**16)
        check_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, _INT64)
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise refusal("gpu_memory_utilization", share, "in (0, 1]")
        # Block 0 is reserved.
        check_range("num_blocks_override", self.num_blocks_override, 2, _INT32)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Which device runs the model.

    Attributes:
      device: NAME[:INDEX] of an installed platform, or "auto"; without it, LEADFRAME_DEVICE,
        and "auto" when that is not set.
      options: `-o KEY=VALUE` options of the platform.
      op_order: `--op OP=NAME,NAME` preferences.
      op_fallback: "device" lets missing ops run as references on the device, "host" also on
        the host.
      tensor_parallel_size: Devices that share the model, from the chosen one on.
      enforce_eager: Do not compile or capture steps.
    """

    device: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    op_order: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    op_fallback: Literal["device", "host"] = "device"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        check_types(self)
        check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from.

    Attributes:
      model: A Hugging Face directory or a GGUF file; without it, the embedded default model.
      dtype: Type of weights and activations; "auto" takes the backend's best.
      max_model_len: Longest sequence in tokens, prompt and output; without it, the model's,
        or what the KV cache can hold if that is less.
      model_impl: "leadframe" for native model files, "transformers" for the Transformers
        backend, "auto" for native where there is one.
      seed: Base of the seeds of requests that bring none; without it, a random one.
      scheduler: How work is chosen.
      cache: The KV cache.
      device: The device.
    """

    model: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    model_impl: Literal["auto", "leadframe", "transformers"] = "auto"
    seed: int | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        check_types(self)
        check_range("max_model_len", self.max_model_len, 1, _INT32)
        check_range("seed", self.seed, -_INT64 - 1, _INT64)
