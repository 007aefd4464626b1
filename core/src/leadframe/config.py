"""Settings, checked when they are built.

Frozen: what is measured later is returned, not written back.
The docstring of each field is its `--help` text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from leadframe.errors import ConfigError


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value}; it must be at least 1")


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
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("long_prefill_token_threshold", "max_num_queued_reqs"):
            if getattr(self, name) < 0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must be at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than "
                f"--max-num-seqs, {self.max_num_seqs}: a decode of every running request must "
                "fit one step; raise the first or lower the second"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much KV cache there is and how it is shared.

    Attributes:
      block_size: Tokens per block; None takes the backend's preferred size.
      gpu_memory_utilization: Share of the device's memory (on a host: of what the process may
        use) for weights, steps and KV together; None is 0.9 on an accelerator and 0.5 on a host.
      kv_cache_memory_bytes: Exact size of the KV cache; None sizes it from what is left.
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
        _positive("block_size", self.block_size)
        _positive("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization is {share}; it must be in (0, 1]")
        if self.num_blocks_override is not None and self.num_blocks_override < 2:
            raise ConfigError("num_blocks_override must be at least 2: block 0 is reserved")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Which device runs the model.

    Attributes:
      device: NAME[:INDEX] of an installed platform, or "auto"; None takes LEADFRAME_DEVICE, and
        "auto" when that is not set.
      options: `-o KEY=VALUE` options of the platform.
      op_order: `--op OP=NAME,NAME` preferences.
      op_fallback: "device" lets missing ops run as references on the device, "host" also on
        the host.
      tensor_parallel_size: Devices that share the model.
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
        _positive("tensor_parallel_size", self.tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from.

    Attributes:
      model: A Hugging Face directory, a GGUF file, or None for the embedded default model.
      dtype: Type of weights and activations; "auto" takes the backend's best.
      max_model_len: Longest sequence in tokens, prompt and output; None takes the model's, or
        what the KV cache can hold if that is less.
      model_impl: "leadframe" for native model files, "transformers" for the Transformers
        backend, "auto" for native where there is one.
      seed: Base of the seeds of requests that bring none; None is random.
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
        _positive("max_model_len", self.max_model_len)
