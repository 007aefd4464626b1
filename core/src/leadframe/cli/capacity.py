"""`leadframe capacity [MODEL] --memory SIZE`: what fits a device that need not be here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from leadframe.cli.parser import Parser, add_field, byte_size, token_count
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import ConfigError
from leadframe.kv_cache.capacity import format_gib

if TYPE_CHECKING:
    from leadframe.engine.estimate import Estimate
    from leadframe.models.footprint import Description

_NEEDS: Final = "A Hugging Face directory, of which config.json is enough, or a GGUF file."
_SIZES: Final = {
    "--memory": "memory of each device",
    "--reserve": "what steps and graphs take of it: a start's table shows that",
    "--bandwidth": "bytes that a device reads in a second, such as 3.35TB: shows times, too",
}
_UPPER_BOUND: Final = (
    "An upper bound: a start measures what steps and graphs take and leaves that much less "
    "(--reserve), and a backend may pad its cache."
)


def run(argv: Sequence[str]) -> int:
    """Prints what devices of a given memory would hold.

    Raises:
      ConfigError: they would not hold the model, or one request of the wanted length.
      ModelError: there is no such model.
    """
    args = _parser().parse(argv)
    report = _report(args)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("\n".join(report.lines()))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="leadframe capacity",
        description="Compute what a device would hold. Neither the device nor weights are needed.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_NEEDS)
    for flag, help_text in _SIZES.items():
        is_needed = flag == "--memory"
        parser.add_argument(
            flag, type=byte_size, required=is_needed, metavar="SIZE", help=help_text
        )
    add_field(
        parser, DeviceConfig, "tensor_parallel_size", "--tensor-parallel-size", "-tp", metavar="N"
    )
    add_field(parser, EngineConfig, "dtype")
    add_field(parser, EngineConfig, "max_model_len", type=token_count, metavar="TOKENS")
    add_field(parser, SchedulerConfig, "max_num_seqs", type=token_count)
    add_field(parser, CacheConfig, "gpu_memory_utilization", type=float, metavar="FRACTION")
    add_field(parser, CacheConfig, "block_size", type=int)
    add_field(parser, CacheConfig, "kv_cache_dtype")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")
    return parser


def _report(args: argparse.Namespace) -> _Report:
    from leadframe.engine.estimate import estimate
    from leadframe.models.footprint import describe_model

    described = describe_model(args.model)
    config = EngineConfig(
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        # a budget that admits any number of rows: no step is run
        scheduler=SchedulerConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=2**24),
        cache=CacheConfig(
            block_size=args.block_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_dtype=args.kv_cache_dtype,
        ),
        device=DeviceConfig(tensor_parallel_size=args.tensor_parallel_size),
    )
    if args.bandwidth == 0:
        raise ConfigError("--bandwidth is 0; it must be at least 1 byte a second")
    found = estimate(described.model, config, args.memory, args.reserve or 0)
    return _Report(described, found, args.memory, args.max_num_seqs, args.bandwidth)


class _Report(NamedTuple):
    """An estimate and what it was made from."""

    described: Description
    found: Estimate
    memory: int
    max_num_seqs: int
    bandwidth: int | None

    def lines(self) -> list[str]:
        """Returns what people read."""
        found, info = self.found, self.described.model.info
        devices = f" on each of {found.ranks} devices" if found.ranks > 1 else ""
        return [
            f"model: {self.described.name} ({info.architecture}), {info.num_parameters:,} "
            f"parameters, {found.dtype}",
            f"memory{devices}: {format_gib(self.memory)}, of which "
            f"{format_gib(found.budget_bytes)} may be used; weights take "
            f"{format_gib(found.weight_bytes)}, and {format_gib(found.kept_free_bytes)} stay free",
            f"K and V{devices}: {found.token_bytes:,} bytes a token, {found.kv_dtype}",
            found.capacity.line(found.max_model_len, found.ranks),
            "",
            *self._table(),
            "",
            _UPPER_BOUND,
        ]

    def _table(self) -> list[str]:
        head = ["a decode step of", "context", "reads"]
        rows = [head + (["takes at least", "at most"] if self.bandwidth else [])]
        for step in self._steps():
            row = [
                f"{step.requests:,} request{'s' if step.requests > 1 else ''}",
                f"{step.context:,}",
                format_gib(step.read_bytes),
            ]
            if step.seconds is not None:
                rate = step.requests / step.seconds
                row += [f"{step.seconds * 1e3:.3g} ms", f"{rate:,.0f} tokens/s"]
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

    def _steps(self) -> list[_Step]:
        """One long request; as many of them as fit; and as many as fit that are shorter."""
        longest = self.found.max_model_len
        shorter = max(1, longest // 8)
        cases = [(1, longest), (self._fitting(longest), longest), (self._fitting(shorter), shorter)]
        return [self._step(*case) for case in dict.fromkeys(cases)]

    def _fitting(self, context: int) -> int:
        return min(self.max_num_seqs, int(self.found.capacity.max_concurrency(context)))

    def _step(self, requests: int, context: int) -> _Step:
        read_bytes = self.found.step_bytes(requests, context)
        seconds = read_bytes / self.bandwidth if self.bandwidth else None
        return _Step(requests, context, read_bytes, seconds)

    def as_json(self) -> dict[str, object]:
        """Returns the same under stable keys; `_bytes` are of one device, `kv_cache` of all."""
        found, info = self.found, self.described.model.info
        capacity = found.capacity
        return {
            "model": self.described.name,
            "architecture": info.architecture,
            "num_parameters": info.num_parameters,
            "dtype": found.dtype,
            "kv_cache_dtype": found.kv_dtype,
            "tensor_parallel_size": found.ranks,
            "memory_bytes": self.memory,
            "budget_bytes": found.budget_bytes,
            "kept_free_bytes": found.kept_free_bytes,
            "weight_bytes": found.weight_bytes,
            "kv_token_bytes": found.token_bytes,
            "kv_cache": {
                "num_blocks": capacity.num_usable_blocks,
                "block_size": capacity.block_size,
                "num_tokens": capacity.num_tokens,
                "bytes": capacity.usable_bytes,
            },
            "max_model_len": found.max_model_len,
            "max_concurrency": capacity.max_concurrency(found.max_model_len),
            "decode_steps": [step._asdict() for step in self._steps()],
        }


class _Step(NamedTuple):
    """What a decode step costs each device: the bytes it reads, and the time by bandwidth."""

    requests: int
    context: int
    read_bytes: int
    seconds: float | None
