"""`leadframe bench scheduler`: what a step costs on the host, with a model that does nothing.

Every running request decodes one token a step; every seat is taken, so that the waiting requests
stay. Prompts have different lengths, so that in each step some requests need a new block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from leadframe.bench.arguments import count
from leadframe.config import SchedulerConfig
from leadframe.kv_cache import KVCacheManager, blocks_for
from leadframe.platform.capabilities import Capabilities
from leadframe.request import Request
from leadframe.runner.batch_builder import BatchBuilder
from leadframe.runner.buckets import BucketPolicy
from leadframe.sampling_params import SamplingParams
from leadframe.scheduler import Scheduler

RUNNING = (64, 256, 1024)
"""Numbers of running requests that are measured."""
WAITING = (0, 10_000)
"""Numbers of waiting requests that are measured."""

_BLOCK_SIZE = 16
_MAX_PROMPT = 512
_TOKEN = 5
_WIDTH = 25
"""Of a column of times."""


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """One row of the report. Times are microseconds; medians unless they say otherwise.

    Attributes:
      running: requests that decode in every step.
      waiting: requests that wait.
      us_per_step: `schedule` and `build` together; what `update` takes comes on top.
      us_per_step_p99: the same, 99th percentile.
      us_schedule: choosing rows and blocks.
      us_build: packing the batch.
      us_update: recording the tokens.
      steps: how many were timed.
    """

    running: int
    waiting: int
    us_per_step: float
    us_per_step_p99: float
    us_schedule: float
    us_build: float
    us_update: float
    steps: int


def run_scheduler_bench(
    running: Iterable[int] = RUNNING,
    waiting: Iterable[int] = WAITING,
    steps: int = 200,
    *,
    temperature: float = 0.0,
) -> list[dict[str, float]]:
    """Measures every combination of running and waiting.

    Args:
      running: numbers of running requests.
      waiting: numbers of waiting requests.
      steps: steps to time for each combination.
      temperature: of every request; above 0 the batch carries draws.

    Returns:
      One `SchedulerCost` a combination, as dictionaries.
    """
    waiting = tuple(waiting)
    return [
        asdict(_measure(num_running, num_waiting, steps, temperature))
        for num_running in running
        for num_waiting in waiting
    ]


def _measure(running: int, waiting: int, steps: int, temperature: float) -> SchedulerCost:
    scheduler, builder = _saturated(running, waiting, steps, temperature)
    seconds = np.empty((3, steps))
    for step in range(steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        builder.build(output)
        built = time.perf_counter()
        scheduler.update(output, [_TOKEN] * len(output.rows))
        seconds[:, step] = scheduled - start, built - scheduled, time.perf_counter() - built
    micros = seconds * 1e6
    per_step = micros[0] + micros[1]
    schedule, build, update = np.median(micros, axis=1)
    return SchedulerCost(
        running=running,
        waiting=waiting,
        us_per_step=round(float(np.median(per_step)), 1),
        us_per_step_p99=round(float(np.percentile(per_step, 99)), 1),
        us_schedule=round(float(schedule), 1),
        us_build=round(float(build), 1),
        us_update=round(float(update), 1),
        steps=steps,
    )


def _saturated(
    running: int, waiting: int, steps: int, temperature: float
) -> tuple[Scheduler, BatchBuilder]:
    """A scheduler with all prompts of the running requests computed."""
    # Prompts finish at different steps: the first ones already decode while the last compute.
    budget = max(8192, running)
    max_tokens = steps + 16 + running * _MAX_PROMPT // budget
    max_model_len = _MAX_PROMPT + max_tokens
    num_blocks = running * blocks_for(max_model_len, _BLOCK_SIZE) + 1
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=budget)
    kv = KVCacheManager(num_blocks, _BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(config, kv, max_model_len)
    policy = BucketPolicy(Capabilities("null"), running, budget, max_model_len, _BLOCK_SIZE)
    builder = BatchBuilder(_BLOCK_SIZE, running, policy)
    for request in _requests(running + waiting, max_tokens, temperature):
        scheduler.add(request)
    while True:
        output = scheduler.schedule()
        builder.build(output)
        if output.num_decodes == running:
            return scheduler, builder
        scheduler.update(output, [_TOKEN if row.samples else None for row in output.rows])


def _requests(count: int, max_tokens: int, temperature: float) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    lengths = rng.integers(16, _MAX_PROMPT, count)
    prompts = [rng.integers(0, 30_000, length).tolist() for length in lengths]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            params=params,
            seed=i,
            stop_ids=frozenset([2]),
            max_total_tokens=len(prompt) + max_tokens,
        )
        for i, prompt in enumerate(prompts)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument(
        "--running", type=count, nargs="+", default=RUNNING, help="running requests"
    )
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, help="waiting requests")
    parser.add_argument("--steps", type=count, default=200, help="timed steps of each combination")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints one row for each combination."""
    rows = run_scheduler_bench(args.running, args.waiting, args.steps, temperature=args.temperature)
    print(json.dumps(rows, indent=2) if args.json else _table(rows))
    return 0


def _title(name: str) -> str:
    # "per step" reads as if it were all of a step, and leaves `update` out
    name = name.removeprefix("us_").replace("per_step", "schedule + build")
    return name.replace("_", " ") + " µs"


def _table(rows: Sequence[dict[str, float]]) -> str:
    names = ("us_per_step", "us_per_step_p99", "us_schedule", "us_build", "us_update")
    header = f"{'running':>8}{'waiting':>9}" + "".join(
        f"{_title(name):>{_WIDTH}}" for name in names
    )
    lines = [header]
    for row in rows:
        values = "".join(f"{row[name]:>{_WIDTH}.1f}" for name in names)
        lines.append(f"{row['running']:>8.0f}{row['waiting']:>9.0f}{values}")
    return "\n".join(lines)
