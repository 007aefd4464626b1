"""Sizes the KV cache from what a measured step leaves, and makes every step ready.

Weights are loaded, then the largest step runs once over a pool of a few blocks; what the budget
has left beside that peak becomes blocks. A size that the user fixed needs no such step. Steps are
compiled over the real pool and weighed; if together they are over the budget, the pool shrinks by
the overshoot and they are made again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from leadframe.config import EngineConfig
from leadframe.errors import ConfigError, DeviceOOM
from leadframe.kv_cache.capacity import (
    KVCapacity,
    blocks_for,
    capacity_of,
    check_max_model_len,
    fit_max_model_len,
    format_gib,
    useful_capacity,
)
from leadframe.metrics import StartupLedger
from leadframe.models import ModelInfo
from leadframe.platform.backend import CompiledStep, KVSpec
from leadframe.platform.batch import Bucket
from leadframe.platform.info import PlatformKind
from leadframe.runner.batch_builder import BatchBuilder
from leadframe.runner.buckets import BucketPolicy
from leadframe.runner.runner import ModelRunner

logger = logging.getLogger(__name__)

ACCELERATOR_FRACTION = 0.9
HOST_FRACTION = 0.5
"""A host runs other things too."""

_HOST_PROFILE_TOKENS = 64
"""On a host a full step takes seconds: a smaller one is measured, and scaled."""
_ATTEMPTS = 3
MARGIN_FRACTION = 0.02
"""Share of the budget left for what is not measured: fragments, edits, log-probabilities."""


def memory_fraction(config: EngineConfig, kind: PlatformKind) -> float:
    """Returns the share of memory to use: as configured, or a default by kind of platform."""
    share = config.cache.gpu_memory_utilization
    if share is not None:
        return share
    return ACCELERATOR_FRACTION if kind == "accelerator" else HOST_FRACTION


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How large the KV cache became.

    Attributes:
      capacity: blocks and bytes.
      max_model_len: longest sequence to serve.
      budget_bytes: device memory that the engine may use in all.
      peak_bytes: what weights and the measured step used of it.
      ranks: devices that share the model; every number of bytes is over all of them.
    """

    capacity: KVCapacity
    max_model_len: int
    budget_bytes: int
    peak_bytes: int
    ranks: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks in memory, the null block included."""
        return self.capacity.num_blocks

    @property
    def line(self) -> str:
        """The capacity line."""
        return self.capacity.line(self.max_model_len, self.ranks)


class KVSizer:
    """Sizes the KV cache of one engine.

    Args:
      config: the settings.
      runner: holds weights and steps.
      spec: the KV cache of the model.
      info: the model.
      ledger: where time and bytes are noted.
      kind: what `PlatformInfo.kind` says of the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        spec: KVSpec,
        info: ModelInfo,
        ledger: StartupLedger,
        kind: PlatformKind,
    ) -> None:
        self._shrink_step = kind != "accelerator" and not runner.backend.caps.static_shapes
        self._config = config
        self._runner = runner
        self._backend = runner.backend
        self._spec = spec
        self._limit = info.max_position_embeddings
        self._ledger = ledger
        self._block_bytes = self._backend.kv_block_bytes(spec)
        memory = self._backend.memory()
        budget = int(memory.total * memory_fraction(config, kind))
        self._budget = min(budget, memory.free + memory.used)
        check_max_model_len(config.max_model_len, self._limit)

    def run(self) -> KVPlan:
        """Profiles, allocates, compiles; leaves the runner ready.

        Raises:
          ConfigError: the memory does not hold one sequence of the wanted length.
          DeviceOOM: not even the weights and a step fit.
        """
        with self._ledger.phase("profile") as phase:
            peak = self._backend.memory().used if self._is_fixed else self._profile()
            phase.bytes = peak
        available = self._available(peak)
        for attempt in range(_ATTEMPTS):
            plan = self._plan(available, peak)
            try:
                overshoot = self._allocate_and_prepare(plan)
            except DeviceOOM as error:
                is_last = self._is_fixed or attempt == _ATTEMPTS - 1
                if is_last or error.phase not in ("kv", "compile", "step"):
                    raise
                overshoot = max(error.requested - error.free, plan.capacity.total_bytes // 10)
            if overshoot <= 0 or self._is_fixed or attempt == _ATTEMPTS - 1:
                return plan
            logger.warning("steps took more than planned; shrinking the KV cache by %d", overshoot)
            available = plan.capacity.total_bytes - overshoot
        raise DeviceOOM(available, 0, "kv")

    @property
    def _is_fixed(self) -> bool:
        cache = self._config.cache
        return cache.num_blocks_override is not None or cache.kv_cache_memory_bytes is not None

    def _fixed_bytes(self) -> int | None:
        """Returns the size that the user fixed, checked against the device, or None.

        Raises:
          ConfigError: the device has less memory than that.
        """
        cache = self._config.cache
        if cache.num_blocks_override is not None:
            fixed = cache.num_blocks_override * self._block_bytes
        elif cache.kv_cache_memory_bytes is not None:
            fixed = cache.kv_cache_memory_bytes
        else:
            return None
        free = self._backend.memory().free
        if fixed > free:
            raise ConfigError(
                f"the KV cache is set to {format_gib(fixed)} and the device has "
                f"{format_gib(free)} free; lower --kv-cache-memory-bytes"
            )
        return fixed

    def _available(self, peak: int) -> int:
        fixed = self._fixed_bytes()
        if fixed is not None:
            return fixed
        available = self._budget - peak - int(self._budget * MARGIN_FRACTION)
        if available < 2 * self._block_bytes:
            raise ConfigError(
                f"no memory is left for the KV cache: the budget is {format_gib(self._budget)}, "
                f"weights and the largest step take {format_gib(peak)}; raise "
                "--gpu-memory-utilization or lower --max-num-batched-tokens"
            )
        return available

    def _plan(self, available: int, peak: int) -> KVPlan:
        capacity = capacity_of(available, self._spec.block_size, self._block_bytes)
        if self._backend.caps.static_shapes and not self._is_fixed:
            # The pool is one of the shapes: another size would find no compiled step in a cache.
            capacity = capacity.steadied()
        length = fit_max_model_len(capacity, self._config.max_model_len, self._limit)
        ranks = self._config.device.tensor_parallel_size
        return KVPlan(self._useful(capacity, length), length, self._budget, peak, ranks)

    def _useful(self, capacity: KVCapacity, length: int) -> KVCapacity:
        if self._is_fixed:
            return capacity
        rows = self._config.scheduler.max_num_seqs
        useful = useful_capacity(capacity, rows, length)
        if useful != capacity:
            self._ledger["kv"].note = (
                f"capped: {rows:,} requests (--max-num-seqs) of {length:,} tokens, twice over, "
                "need no more"
            )
        return useful

    def _policy(self, max_model_len: int) -> BucketPolicy:
        scheduler = self._config.scheduler
        return BucketPolicy(
            self._backend.caps,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            max_model_len,
            self._spec.block_size,
            enforce_eager=self._config.device.enforce_eager,
        )

    def _profile(self) -> int:
        """Runs the largest step over a small pool; returns the peak bytes without that pool."""
        length = self._config.max_model_len or self._limit
        policy = self._policy(length)
        scheduler = self._config.scheduler
        tokens = scheduler.max_num_batched_tokens
        rows = min(scheduler.max_num_seqs, tokens)
        shrink = max(1, tokens // _HOST_PROFILE_TOKENS) if self._shrink_step else 1
        tokens, rows = -(-tokens // shrink), -(-rows // shrink)
        width = blocks_for(-(-tokens // rows), self._spec.block_size)
        bucket = policy.bucket_for(Bucket(tokens, rows, 0, width, rows, "sort"))
        self._runner.allocate(self._spec, 2)
        before = self._backend.memory().used
        self._runner.profile(bucket)
        peak = self._backend.memory().peak
        self._runner.release()
        return before + shrink * max(0, peak - before) - 2 * self._block_bytes

    def _allocate_and_prepare(self, plan: KVPlan) -> int:
        """Allocates the pool and makes the steps; returns bytes over the budget."""
        with self._ledger.phase("kv") as phase:
            self._runner.allocate(self._spec, plan.num_blocks)
            phase.bytes = plan.capacity.total_bytes
        policy = self._policy(plan.max_model_len)
        rows = self._config.scheduler.max_num_seqs
        self._runner.configure(policy, BatchBuilder(self._spec.block_size, rows, policy))
        self._prepare()
        return self._backend.memory().used - self._budget

    def _prepare(self) -> None:
        """Compiles and captures; the two are told apart by what each step says of itself."""

        def note(bucket: Bucket, step: CompiledStep) -> None:
            label = f"{bucket.num_tokens} tokens, {bucket.num_seqs} rows, {bucket.num_blocks} wide"
            label += "" if bucket.sample == "greedy" else f", {bucket.sample}"
            compiled.detail(label, step.compile_seconds, step.bytes, step.cache_hit)
            compiled.bytes += step.bytes
            if step.capture_seconds:
                captured.detail(label, step.capture_seconds, step.bytes)
                captured.seconds += step.capture_seconds
                compiled.seconds -= step.capture_seconds

        captured = self._ledger["capture"]
        with self._ledger.phase("compile") as compiled:
            self._runner.prepare(note)


def size_kv_cache(
    config: EngineConfig,
    runner: ModelRunner,
    spec: KVSpec,
    info: ModelInfo,
    ledger: StartupLedger,
    kind: PlatformKind,
) -> KVPlan:
    """Sizes the KV cache; see `KVSizer`."""
    return KVSizer(config, runner, spec, info, ledger, kind).run()
