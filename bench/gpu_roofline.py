"""Attention of the Triton kernels as shares of what this device does here and now.

Decode is held against copy bandwidth, prefill against the matrix-product peak, both measured in
this process; torch's own attention runs on the same problem.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from gpu_common import Clock, Report, parser, prepare


@dataclass(frozen=True)
class Problem:
    """Equal rows: `new` tokens each, at the end of `context` keys."""

    rows: int
    new: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        """How the report calls it."""
        kind = "decode" if self.new == 1 else "prefill"
        heads = f"H{self.heads}/{self.kv_heads} D{self.dim}"
        return f"{kind} {self.rows}x{self.new}@{self.context} {heads}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of 16-bit K and V that a decode must read."""
        return self.rows * self.context * self.kv_heads * self.dim * 2 * 2

    @property
    def operations(self) -> float:
        """Floating-point operations of the causal part."""
        first = self.context - self.new
        keys = self.new * first + self.new * (self.new + 1) / 2
        return 4.0 * self.rows * keys * self.heads * self.dim


PROBLEMS = (
    Problem(32, 1, 4096),
    Problem(128, 1, 4096),
    Problem(4, 1, 32768),
    Problem(1, 1, 65536),
    Problem(256, 1, 1024),
    Problem(32, 1, 4096, heads=32, kv_heads=8, dim=64),
    Problem(1, 8192, 8192),
    Problem(4, 2048, 2048),
    Problem(1, 2048, 16384),
    Problem(1, 8192, 8192, dim=64),
)
FLEX = PROBLEMS[6]
"""The one on which flex attention runs too: it takes seconds to compile."""
TOYS = (Problem(2, 1, 64, 4, 2, 64), Problem(1, 1, 600, 2, 1, 64), Problem(1, 40, 64, 4, 2, 64))


class Bench:
    """Tensors and timings of one device."""

    def __init__(self, device: str, toy: bool, *, tune: bool = True) -> None:
        import torch

        from leadframe.platform import Limits
        from leadframe.platform.selection import create_backend, select_device

        self.toy = toy
        options = {"tune": "on"} if tune and not toy else {}
        self.backend: Any = create_backend(select_device(device, os.environ), options, Limits())
        self.device = torch.device("cpu" if toy else "cuda")
        self.dtype = torch.float16 if toy else torch.bfloat16
        self.clock = Clock(self.device, repeats=3 if toy else 5)

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a large copy."""
        import torch

        size = (1 << 20) if self.toy else (2 << 30)
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.clock.seconds(lambda: target.copy_(source))

    def matmul_peak(self) -> float:
        """Operations a second of a large square product."""
        import torch

        n = 128 if self.toy else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2.0 * n**3 / self.clock.seconds(lambda: a @ b)

    def tensors(self, problem: Problem, block_size: int) -> tuple[Any, Any, Any]:
        """Step arrays, query and KV layer."""
        import torch

        from leadframe_triton.measure import Load, arrays_of, cache_of

        load = Load(problem.rows, problem.new, problem.context, problem.new == 1)
        arrays = arrays_of(load, block_size, self.device)
        kv = cache_of(load, (block_size, problem.kv_heads, problem.dim), self.dtype, self.device)
        shape = (arrays.bucket.num_tokens, problem.heads, problem.dim)
        return arrays, torch.randn(shape, device=self.device, dtype=self.dtype), kv

    def ours(self, problem: Problem) -> float:
        """Seconds of the Triton kernels."""
        from leadframe.platform.capabilities import AttnParams

        params = AttnParams.of(problem.dim**-0.5)
        arrays, q, kv = self.tensors(problem, 16)
        attention = self.backend.ops["attention"]
        return self.clock.seconds(lambda: attention(q, kv, arrays, params))

    def compile_tiles(self, problem: Problem) -> None:
        """Launches every tile of a problem's shape on a few keys, split and not."""
        from leadframe.platform.capabilities import AttnParams
        from leadframe_triton.attention import attention
        from leadframe_triton.tiles import tiles_for

        launches = self.backend.unguarded.launches
        kind = "decode" if problem.new == 1 else "ragged"
        for context in (32, 600):
            few = replace(problem, rows=1, new=min(problem.new, 32), context=context)
            arrays, q, kv = self.tensors(few, 16)
            for tile in tiles_for(launches.arch, kind, problem.dim, 2):
                one = replace(launches, choose_tile=lambda arch, key, tile=tile: tile)
                attention(one, q, kv, arrays, AttnParams.of(problem.dim**-0.5))

    def sdpa(self, problem: Problem) -> float:
        """Seconds of torch's scaled_dot_product_attention on contiguous keys, without paging."""
        import torch
        import torch.nn.functional as functional

        def make(heads: int, length: int) -> Any:
            shape = (problem.rows, heads, length, problem.dim)
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        q = make(problem.heads, problem.new)
        k, v = (make(problem.kv_heads, problem.context) for _ in range(2))
        causal = problem.new > 1 and problem.new == problem.context
        if problem.new > 1 and not causal:
            raise NotImplementedError("no fused causal mask for a chunk behind a prefix")
        return self.clock.seconds(
            lambda: functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            )
        )

    def varlen(self, problem: Problem) -> float:
        """Seconds of torch's varlen_attn on the paged cache itself."""
        from torch.nn.attention.varlen import varlen_attn

        arrays, q, kv = self.tensors(problem, 256 if problem.context >= 256 else 16)
        return self.clock.seconds(
            lambda: varlen_attn(
                q,
                kv[0],
                kv[1],
                arrays.query_start,
                None,
                problem.new,
                problem.context,
                window_size=(-1, 0),
                enable_gqa=True,
                seqused_k=arrays.seq_lens,
                block_table=arrays.block_table,
            )
        )

    def flex(self, problem: Problem) -> float:
        """Seconds of compiled flex attention on contiguous keys."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def make(heads: int, length: int) -> Any:
            shape = (problem.rows, heads, length, problem.dim)
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        first = problem.context - problem.new

        def causal(b: Any, h: Any, query: Any, key: Any) -> Any:
            return query + first >= key

        q = make(problem.heads, problem.new)
        k, v = (make(problem.kv_heads, problem.context) for _ in range(2))
        mask = create_block_mask(causal, None, None, problem.new, problem.context, self.device)
        compiled = torch.compile(flex_attention)
        return self.clock.seconds(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))


def measure(bench: Bench, report: Report, problem: Problem, copy: float, peak: float) -> None:
    """Adds one problem: the kernels, their share of the roof, and the peers' ratios."""
    rows: dict[str, Any] = report.values.setdefault("problems", {})
    row: dict[str, Any] = {}
    rows[problem.name] = row
    peers = ["sdpa", "varlen"] + (["flex"] if problem is FLEX else [])
    for name in ("ours", *peers):
        try:
            row[f"{name}_microseconds"] = round(1e6 * getattr(bench, name)(problem), 1)
        except Exception as error:  # a peer that is absent must not cost the others
            row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
        report.put()
    ours = row.get("ours_microseconds", 0.0) / 1e6
    if not ours:
        return
    if problem.new == 1:
        row["gigabytes_per_second"] = round(problem.kv_bytes / ours / 1e9, 1)
        row["share_of_copy_bandwidth"] = round(problem.kv_bytes / ours / copy, 3)
    else:
        row["teraflops"] = round(problem.operations / ours / 1e12, 1)
        row["share_of_matmul_peak"] = round(problem.operations / ours / peak, 3)
    for name in peers:
        if f"{name}_microseconds" in row:
            row[f"speed_over_{name}"] = round(row[f"{name}_microseconds"] / 1e6 / ours, 2)
    report.put()


def warm(args: Any) -> None:
    """Compiles every tile that tuning may choose, and leaves it in the caches on disk."""
    bench = Bench(args.device, args.toy, tune=False)
    for problem in TOYS if args.toy else PROBLEMS:
        bench.compile_tiles(problem)
    if not args.toy:
        bench.flex(FLEX)
    bench.backend.close()


def main() -> None:
    """Measures the roofs, then every problem."""
    args = parser(__doc__).parse_args()
    prepare(args.device)
    if args.warm:
        return warm(args)
    report = Report(args.report)
    bench = Bench(args.device, args.toy)
    copy = report.attempt("copy_bytes_per_second", bench.copy_bandwidth) or 1.0
    peak = report.attempt("matmul_flops", bench.matmul_peak) or 1.0
    for problem in TOYS if args.toy else PROBLEMS:
        measure(bench, report, problem, copy, peak)
    bench.backend.close()
    return None


if __name__ == "__main__":
    sys.exit(main())
