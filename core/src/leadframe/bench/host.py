"""`leadframe bench host`: how long a device would wait for the host between two decode steps.

The whole engine runs, streaming to asyncio tasks, over a device that computes nothing and takes a
given time for it. A gap is what passes from the end of one step to the launch of the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from leadframe.bench import idle_backend
from leadframe.bench.arguments import count
from leadframe.engine import AsyncEngine, Engine
from leadframe.engine.startup import build_parts
from leadframe.errors import ConfigError
from leadframe.llm import engine_config
from leadframe.models import open_model
from leadframe.sampling_params import SamplingParams

RUNNING = (1, 32, 64, 256)
"""Numbers of streams that are measured."""

WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=0),
    "penalised": SamplingParams(temperature=0.8, seed=0, frequency_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "stop": SamplingParams(temperature=0.0, stop=["\n\nUser:"]),
}
"""How requests sample, by the name that `--ways` takes."""

_PROMPT = 16
_TAIL = 8
"""Tokens at both ends of a request that are not measured."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """One row of the report.

    Attributes:
      running: streams that decode in every step.
      way: how they sample.
      us_gap: median microseconds between two device steps.
      us_gap_p99: the same, 99th percentile.
      steps: how many were measured.
    """

    running: int
    way: str
    us_gap: float
    us_gap_p99: float
    steps: int


def run_host_bench(
    running: Iterable[int] = RUNNING,
    ways: Sequence[str] = ("greedy", "sampled"),
    steps: int = 200,
    step_ms: float = 5.0,
    model: str | None = None,
) -> list[HostCost]:
    """Measures every combination of a number of streams and a way to sample.

    Args:
      running: numbers of streams.
      ways: names of `WAYS`.
      steps: decode steps of each stream.
      step_ms: what a step takes on the device, in milliseconds.
      model: whose tokenizer and layers there are; None is the embedded model. No weight is read.
    """
    return [
        asyncio.run(_measure(model, num, way, steps, step_ms)) for num in running for way in ways
    ]


async def _measure(
    model: str | None, running: int, way: str, steps: int, step_ms: float
) -> HostCost:
    length = steps + 2 * _TAIL
    config = engine_config(
        model,
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running * _PROMPT),
        max_model_len=_PROMPT + length,
        seed=0,
    )
    vocab_size = open_model(config.model).model.info.vocab_size
    if vocab_size <= idle_backend.FIRST_TOKEN:
        raise ConfigError(
            f"the model has {vocab_size} tokens; tokens from {idle_backend.FIRST_TOKEN} on are "
            "drawn, so that none is special: take a model with more"
        )
    backend = idle_backend.IdleBackend(vocab_size, running, step_ms / 1000)
    engine = AsyncEngine(Engine(build_parts(config, backend=backend)))
    rng = np.random.default_rng(1)
    prompts = rng.integers(idle_backend.FIRST_TOKEN, vocab_size, (running, _PROMPT)).tolist()
    params = replace(WAYS[way], max_tokens=length, ignore_eos=True)
    try:
        await asyncio.gather(
            *(_read(engine, str(i), prompt, params) for i, prompt in enumerate(prompts))
        )
    finally:
        await engine.shutdown()
    gaps = [seconds for rows, seconds in backend.gaps if rows == running][_TAIL:-_TAIL]
    micros = np.array(gaps) * 1e6
    median, p99 = np.median(micros), np.percentile(micros, 99)
    return HostCost(running, way, round(float(median), 1), round(float(p99), 1), len(gaps))


async def _read(
    engine: AsyncEngine, request_id: str, prompt: list[int], params: SamplingParams
) -> None:
    async for _ in engine.generate(request_id, prompt, params):
        pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument("--model", help="whose tokenizer is used; default: the embedded model")
    parser.add_argument("--running", type=count, nargs="+", default=RUNNING, help="streams")
    parser.add_argument(
        "--ways", nargs="+", default=("greedy", "sampled"), choices=WAYS, help="how to sample"
    )
    parser.add_argument("--steps", type=count, default=200, help="decode steps of each stream")
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="milliseconds that a step takes on the device"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints one row for each combination."""
    rows = run_host_bench(args.running, args.ways, args.steps, args.step_ms, args.model)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"{'running':>8}{'way':>11}{'gap µs':>12}{'gap p99 µs':>12}")
    for row in rows:
        print(f"{row.running:>8}{row.way:>11}{row.us_gap:>12.1f}{row.us_gap_p99:>12.1f}")
    return 0
