"""What a start would arrive at on a device that is not here, from arithmetic alone.

It uses the functions that size a real cache. What only a measurement tells, the memory of steps
and graphs, is the caller's to reserve: without it an estimate is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leadframe.config import EngineConfig
from leadframe.engine.kv_sizing import ACCELERATOR_FRACTION, MARGIN_FRACTION
from leadframe.errors import ConfigError
from leadframe.kv_cache import kv_token_bytes
from leadframe.kv_cache.capacity import (
    KVCapacity,
    capacity_of,
    check_max_model_len,
    fit_max_model_len,
    format_gib,
    useful_capacity,
)
from leadframe.models import Model, check_ranks
from leadframe.models.footprint import rank_kv_layers, rank_read_bytes, rank_weight_bytes

DTYPE_BYTES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
}  # fmt: skip
DEFAULT_DTYPE: Final = "bfloat16"
DEFAULT_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """What fits. Bytes are of one device, but for those of `capacity`, which are of all.

    Attributes:
      dtype: of weights and activations.
      kv_dtype: of the cache.
      ranks: devices that share the model.
      budget_bytes: what the engine may use.
      kept_free_bytes: of that, what is left for steps, graphs and fragments.
      weight_bytes: weights and constants.
      read_bytes: what of them every step reads.
      window_bytes: for each attention window (None where there is none), the bytes of a token's
        K and V over the layers that have it.
      capacity: the KV cache.
      max_model_len: longest sequence to serve.
    """

    dtype: str
    kv_dtype: str
    ranks: int
    budget_bytes: int
    kept_free_bytes: int
    weight_bytes: int
    read_bytes: int
    window_bytes: tuple[tuple[int | None, int], ...]
    capacity: KVCapacity
    max_model_len: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return sum(num_bytes for _, num_bytes in self.window_bytes)

    def step_bytes(self, requests: int, context: int) -> int:
        """Returns what a decode step must read: weights once, and the K and V in reach of each.

        Args:
          requests: rows of the step.
          context: tokens that each of them has.
        """
        kv = sum(
            num_bytes * (context if window is None else min(context, window))
            for window, num_bytes in self.window_bytes
        )
        return self.read_bytes + requests * kv


def estimate(
    model: Model, config: EngineConfig, memory_bytes: int, reserve_bytes: int = 0
) -> Estimate:
    """Computes what devices of a given memory would hold.

    Args:
      model: what to serve.
      config: the settings that a start would get; `model` and `device.device` are not looked at.
      memory_bytes: memory of each device.
      reserve_bytes: what steps and graphs take of it.

    Raises:
      ConfigError: the model does not divide among the ranks or has fewer positions than wanted, a
        dtype is unknown, or the memory does not hold the model and one such sequence.
    """
    ranks = config.device.tensor_parallel_size
    check_ranks(model, ranks)
    check_max_model_len(config.max_model_len, model.info.max_position_embeddings)
    dtype = _named(config.dtype, "dtype", DEFAULT_DTYPE)
    kv_dtype = _named(config.cache.kv_cache_dtype, "kv-cache-dtype", dtype)
    element = DTYPE_BYTES[dtype]
    windows = _window_bytes(model, DTYPE_BYTES[kv_dtype], ranks)
    weights = rank_weight_bytes(model, element, ranks)
    budget = int(memory_bytes * (config.cache.gpu_memory_utilization or ACCELERATOR_FRACTION))
    kept_free = reserve_bytes + int(budget * MARGIN_FRACTION)
    capacity, length = _cache(
        model, config, budget - kept_free - weights, sum(size for _, size in windows)
    )
    return Estimate(
        dtype=dtype,
        kv_dtype=kv_dtype,
        ranks=ranks,
        budget_bytes=budget,
        kept_free_bytes=kept_free,
        weight_bytes=weights,
        read_bytes=rank_read_bytes(model, element, ranks),
        window_bytes=windows,
        capacity=KVCapacity(capacity.num_blocks, capacity.block_size, ranks * capacity.block_bytes),
        max_model_len=length,
    )


def _named(asked: str, flag: str, default: str) -> str:
    if asked != "auto" and asked not in DTYPE_BYTES:
        raise ConfigError(f"--{flag} is {asked[:64]!r}; known are auto, {', '.join(DTYPE_BYTES)}")
    return default if asked == "auto" else asked


def _window_bytes(
    model: Model, element_bytes: int, ranks: int
) -> tuple[tuple[int | None, int], ...]:
    sizes: dict[int | None, int] = {}
    layers = rank_kv_layers(model.info.kv_layers, ranks)
    for params, layer in zip(model.info.attn, layers, strict=True):
        token = kv_token_bytes([layer], element_bytes)
        sizes[params.window] = sizes.get(params.window, 0) + token
    return tuple(sizes.items())


def _cache(
    model: Model, config: EngineConfig, available: int, token_bytes: int
) -> tuple[KVCapacity, int]:
    """Returns one device's share of the cache, and the longest sequence."""
    block_size = config.cache.block_size or DEFAULT_BLOCK_SIZE
    block_bytes = block_size * token_bytes
    if available < 2 * block_bytes:
        lack = 2 * block_bytes - available
        raise ConfigError(
            f"no memory is left for the KV cache: {format_gib(lack)} a device are lacking for "
            "weights and two blocks; take more memory, a higher --gpu-memory-utilization, or "
            "--tensor-parallel-size"
        )
    found = capacity_of(available, block_size, block_bytes)
    length = fit_max_model_len(found, config.max_model_len, model.info.max_position_embeddings)
    return useful_capacity(found, config.scheduler.max_num_seqs, length), length


__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_DTYPE", "DTYPE_BYTES", "Estimate", "estimate"]
