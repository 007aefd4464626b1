"""From a configuration to an engine that can take its first request.

The order matters: device, weights, op table, a measured step, the size of the KV cache from what
is left, compiled steps, and a second look at the memory. Each phase is timed in the ledger.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from leadframe.config import EngineConfig
from leadframe.engine.kv_sizing import KVPlan, memory_fraction, size_kv_cache
from leadframe.engine.ranks import RankedBackend, rendezvous_path, start_ranks
from leadframe.errors import ConfigError
from leadframe.kv_cache import KVCacheManager
from leadframe.metrics import EngineMetrics, Phase, StartupLedger
from leadframe.models import (
    Checkpoint,
    ModelInfo,
    check_backend,
    check_ranks,
    describe_impl,
    load_weights,
    open_model,
)
from leadframe.platform.backend import Array, Backend, KVSpec
from leadframe.platform.capabilities import OpSpec
from leadframe.platform.info import Limits, PlatformKind
from leadframe.platform.op_table import OpTable, build_op_table
from leadframe.platform.selection import Selection, create_backend, select_device
from leadframe.runner.runner import ModelRunner
from leadframe.scheduler import Scheduler
from leadframe.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (done, total) bytes while weights load."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that an engine is made of."""

    config: EngineConfig
    backend: Backend
    runner: ModelRunner
    scheduler: Scheduler
    tokenizer: Tokenizer
    model_info: ModelInfo
    model_name: str
    model_path: Path
    max_model_len: int
    metrics: EngineMetrics
    ledger: StartupLedger
    ops: OpTable
    kv_plan: KVPlan
    device_summary: str
    device_note: str


def build_parts(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    ledger: StartupLedger | None = None,
    env: Mapping[str, str] | None = None,
    backend: Backend | None = None,
    checkpoint: Checkpoint | None = None,
) -> EngineParts:
    """Builds an engine's parts.

    Args:
      config: the settings.
      progress: called while weights load.
      ledger: where start-up time is noted; None makes a new one.
      env: the environment that device selection reads; None takes the process's.
      backend: a device that exists already, for tests; None selects and creates one.
      checkpoint: a checkpoint that is open already; None opens `config.model`.

    Raises:
      ConfigError: settings contradict each other or the model.
      ModelError: the model cannot be loaded.
      PlatformError: the device cannot be used.
    """
    ledger = ledger or StartupLedger()
    selection = None
    if backend is None:
        environment = os.environ if env is None else env
        selection = select_device(config.device.device, environment)
    with ledger.phase("import") as phase:
        if checkpoint is None:
            checkpoint = open_model(
                config.model, impl=config.model_impl, max_model_len=config.max_model_len
            )
        check_ranks(checkpoint.model, config.device.tensor_parallel_size)
        limits = _limits(selection, config, checkpoint)
        if backend is None:
            assert selection is not None
            backend = _create(selection, config, limits, phase)
    try:
        _check_device(backend, config, checkpoint)
        is_shared = limits.tensor_parallel_size > 1 and backend.caps.rank_processes
        if is_shared and selection is not None:
            with ledger.phase("import"):
                backend = start_ranks(backend, config, selection, limits)
        return _assemble(config, ledger, selection, backend, checkpoint, progress)
    except BaseException:
        backend.close()
        raise


def _create(selection: Selection, config: EngineConfig, limits: Limits, phase: Phase) -> Backend:
    """Creates the backend, says how long that took, and warns of one that only interprets."""
    start = time.perf_counter()
    backend = create_backend(selection, config.device.options, limits)
    phase.note = (
        f"{time.perf_counter() - start:.2f} s for the backend and the kernels that it builds now"
    )
    if backend.caps.simulated == "interpreter":
        logger.warning(
            "%s interprets its kernels on the host, hundreds of times slower than torch: minutes "
            "go by without a word, and it is for tests only",
            selection.name,
        )
    return backend


def _limits(selection: Selection | None, config: EngineConfig, checkpoint: Checkpoint) -> Limits:
    ranks = config.device.tensor_parallel_size
    return Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.max_model_len or checkpoint.model.info.max_position_embeddings,
        memory_fraction=memory_fraction(config, _kind(selection)),
        tensor_parallel_size=ranks,
        rendezvous=rendezvous_path() if ranks > 1 else "",
    )


def _check_device(backend: Backend, config: EngineConfig, checkpoint: Checkpoint) -> None:
    ranks, most = config.device.tensor_parallel_size, backend.caps.tensor_parallel
    check_backend(checkpoint, backend.caps.family, ranks)
    if ranks > most:
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, and this device takes at most {most}; lower it"
        )


def _kind(selection: Selection | None) -> PlatformKind:
    return "test" if selection is None else selection.plugin.info().kind


def _assemble(
    config: EngineConfig,
    ledger: StartupLedger,
    selection: Selection | None,
    backend: Backend,
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> EngineParts:
    info = checkpoint.model.info
    dtype = choose_dtype(config.dtype, backend, checkpoint)
    with ledger.phase("load") as phase:
        tokenizer = load_tokenizer(checkpoint.tokenizer_path)
        weights = _load(backend, checkpoint, dtype, progress)
        phase.bytes = checkpoint.total_bytes
        phase.note = f"{dtype}, {checkpoint.name}, {describe_impl(checkpoint)}"
        if config.device.tensor_parallel_size > 1:
            phase.note += f", shared by {config.device.tensor_parallel_size} ranks"
    kv_spec = make_kv_spec(config, backend, info, dtype)
    ops = resolve_ops(config, backend, selection, info, kv_spec, dtype)
    runner = ModelRunner(backend, checkpoint.model, weights, ops)
    plan = size_kv_cache(config, runner, kv_spec, info, ledger, _kind(selection))
    kv = KVCacheManager(
        plan.num_blocks,
        kv_spec.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    name = checkpoint.name
    metrics = EngineMetrics(name, ledger)
    metrics.set_info("cache_config_info", cache_facts(config, kv_spec, plan, _kind(selection)))
    return EngineParts(
        config=config,
        backend=backend,
        runner=runner,
        scheduler=Scheduler(config.scheduler, kv, plan.max_model_len),
        tokenizer=tokenizer,
        model_info=info,
        model_name=name,
        model_path=checkpoint.tokenizer_path,
        max_model_len=plan.max_model_len,
        metrics=metrics,
        ledger=ledger,
        ops=ops,
        kv_plan=plan,
        device_summary=_summary(selection, backend),
        device_note="" if selection is None else selection.note,
    )


def _load(
    backend: Backend, checkpoint: Checkpoint, dtype: str, progress: Progress | None
) -> Mapping[str, Array]:
    if isinstance(backend, RankedBackend):
        return backend.load(lambda: load_weights(backend, checkpoint, dtype, progress))
    return load_weights(backend, checkpoint, dtype, progress)


def resolve_ops(
    config: EngineConfig,
    backend: Backend,
    selection: Selection | None,
    info: ModelInfo,
    kv_spec: KVSpec,
    dtype: str,
) -> OpTable:
    """Chooses who serves each op of a model.

    Raises:
      Unsupported: nothing serves one.
      ConfigError: `--op` names an op or an implementation that does not exist.
    """
    return build_op_table(
        backend,
        op_specs(info, kv_spec, dtype),
        kernels=selection.kernels() if selection is not None else (),
        order=config.device.op_order,
        fallback=config.device.op_fallback,
        platform=selection.plugin.name if selection is not None else "backend",
    )


def choose_dtype(asked: str, backend: Backend, checkpoint: Checkpoint) -> str:
    """Returns the dtype of weights and activations.

    Raises:
      ConfigError: the backend does not compute in the dtype that was asked for.
    """
    offered = backend.caps.compute_dtypes
    if asked == "auto":
        return offered[0]
    aliases = {"half": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
    dtype = aliases.get(asked, asked)
    if dtype not in offered:
        raise ConfigError(
            f"--dtype is {asked!r}; this device computes in {', '.join(offered)}; "
            "choose one of them or auto"
        )
    return dtype


def make_kv_spec(config: EngineConfig, backend: Backend, info: ModelInfo, dtype: str) -> KVSpec:
    """Returns the KV cache of a model on a backend.

    Raises:
      ConfigError: block size or dtype is not one that the backend takes.
    """
    caps = backend.caps
    block_size = config.cache.block_size or caps.block_sizes[0]
    if block_size not in caps.block_sizes:
        sizes = ", ".join(str(size) for size in caps.block_sizes)
        raise ConfigError(f"--block-size is {block_size}; this device takes {sizes}")
    kv_dtype = config.cache.kv_cache_dtype
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    if kv_dtype not in caps.kv_dtypes:
        offered = ", ".join(caps.kv_dtypes)
        raise ConfigError(f"--kv-cache-dtype is {kv_dtype!r}; this device stores {offered}")
    return KVSpec(info.kv_layers, block_size, kv_dtype)


def cache_facts(
    config: EngineConfig, kv_spec: KVSpec, plan: KVPlan, kind: PlatformKind
) -> dict[str, str]:
    """Returns what became of the KV cache's settings, by the names that dashboards know."""
    return {
        "block_size": str(kv_spec.block_size),
        "num_gpu_blocks": str(plan.num_blocks),
        "gpu_memory_utilization": str(memory_fraction(config, kind)),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "cache_dtype": kv_spec.dtype,
    }


def op_specs(info: ModelInfo, kv: KVSpec, dtype: str) -> list[OpSpec]:
    """Returns what the model will ask of the ops whose support depends on it."""
    specs = []
    layers = set(zip(info.attn, info.kv_layers, strict=True))
    for params, layer in sorted(layers, key=repr):
        for op in ("attention", "kv_append", "kv_copy"):
            spec = OpSpec(
                op=op,
                dtype=dtype,
                kv_dtype=kv.dtype,
                head_dim=layer.head_dim,
                num_heads=info.num_heads,
                num_kv_heads=layer.num_kv_heads,
                block_size=kv.block_size,
                features=params.features,
            )
            specs.append(spec)
    return specs


def _summary(selection: Selection | None, backend: Backend) -> str:
    if selection is None:
        return backend.caps.family
    ranks = f"; {backend.group.count} ranks" if isinstance(backend, RankedBackend) else ""
    return f"{selection.name} ({selection.device.name}{ranks})"
