"""`leadframe bench latency`: TTFT, ITL and TPOT of one stream, without HTTP."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

from leadframe.bench.arguments import count
from leadframe.bench.load_guard import LoadGuard, disturbance
from leadframe.bench.peer import median
from leadframe.bench.workloads import Workload, make_workload
from leadframe.llm import LLM
from leadframe.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument("--rounds", type=count, default=3, help="timed streams")
    parser.add_argument("--max-tokens", type=count, default=64, help="tokens to generate each")


def one_stream(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Streams the first prompt of a workload.

    Returns:
      {"ttft_seconds", "itl_seconds": [...], "tpot_seconds", "foreign_fraction"}.
    """
    llm.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    guard, start = LoadGuard(), time.perf_counter()
    times = [time.perf_counter() for _ in llm.stream(workload.prompts[0], params)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "ttft_seconds": times[0] - start,
        "itl_seconds": gaps,
        "tpot_seconds": (times[-1] - times[0]) / max(1, len(gaps)),
        "foreign_fraction": guard.sample().foreign_fraction,
    }


def run(args: argparse.Namespace, llm: LLM) -> int:
    """Runs the benchmark on a loaded model and prints what it measured."""
    vocab_size = llm.engine.model_info.vocab_size
    workload = make_workload("single", vocab_size, max_tokens=args.max_tokens)
    one_stream(llm, Workload("single", workload.prompts, 2))
    streams = [one_stream(llm, workload) for _ in range(args.rounds)]
    gaps = sorted(gap for stream in streams for gap in stream["itl_seconds"])
    report = {
        "engine": llm.engine.device_summary,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.max_tokens,
        "rounds": args.rounds,
        "foreign_fractions": [stream["foreign_fraction"] for stream in streams],
        "ttft_seconds": median([stream["ttft_seconds"] for stream in streams]),
        "tpot_seconds": median([stream["tpot_seconds"] for stream in streams]),
        "itl_p50_seconds": gaps[len(gaps) // 2] if gaps else None,
        "itl_p99_seconds": gaps[int(len(gaps) * 0.99)] if gaps else None,
    }
    print(json.dumps(report, indent=2) if args.json else _lines(report))
    return 0


def _lines(report: dict[str, Any]) -> str:
    names = ("ttft_seconds", "tpot_seconds", "itl_p50_seconds", "itl_p99_seconds")
    lines = [
        f"one stream on {report['engine']}: {report['prompt_tokens']} prompt tokens, "
        f"{report['output_tokens']} generated, median of {report['rounds']}"
    ]
    for name in names:
        value = report[name]
        label = name.removesuffix("_seconds").replace("_", " ").upper()
        lines.append(f"{label:<10}{'-' if value is None else f'{value * 1000:.1f} ms':>12}")
    mark = disturbance(report["foreign_fractions"])
    return "\n".join([*lines, mark] if mark else lines)
