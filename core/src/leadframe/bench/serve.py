"""`leadframe bench serve`: load on a running server, measured as its clients feel it."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from leadframe.bench.arguments import count
from leadframe.bench.http_load import Target, Timing, get_json, stream_completion
from leadframe.errors import ConfigError

_WORDS = ("metal", "frame", "chip", "pin", "signal", "heat", "wire", "gold", "mould", "die")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument(
        "--model", default=None, help="name to ask for; without it, the first that the server lists"
    )
    parser.add_argument("--num-requests", type=count, default=64, help="requests in all")
    parser.add_argument("--concurrency", type=count, default=16, help="requests at once")
    parser.add_argument(
        "--request-rate", type=float, default=0.0,
        help="requests a second, at random times (Poisson); 0 sends as soon as there is room",
    )  # fmt: skip
    parser.add_argument("--prompt-words", type=count, default=128, help="words in a prompt")
    parser.add_argument("--max-tokens", type=count, default=64, help="tokens to generate each")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and times")


def run(args: argparse.Namespace) -> int:
    """Runs the load and prints what was measured.

    Returns:
      0, or 1 when a request failed.
    """
    for name in ("num_requests", "concurrency", "prompt_words", "max_tokens"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(args, name)}; it must be at least 1")
    report = asyncio.run(measure(args))
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return int(report["failed"] > 0)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Sends every request and returns a report with stable keys."""
    target = Target.parse(args.base_url, args.api_key)
    model = args.model or await _first_model(target)
    rng = random.Random(args.seed)
    bodies = [
        _body(model, rng, args.prompt_words, args.max_tokens) for _ in range(args.num_requests)
    ]
    delays = _delays(rng, args.request_rate, len(bodies))
    room = asyncio.Semaphore(args.concurrency)

    async def one(body: dict[str, object], delay: float) -> Timing:
        await asyncio.sleep(delay)
        async with room:
            return await stream_completion(target, body)

    start = time.monotonic()
    timings = await asyncio.gather(*(one(b, d) for b, d in zip(bodies, delays, strict=True)))
    return _report(args, model, timings, time.monotonic() - start)


async def _first_model(target: Target) -> str:
    models = await get_json(target, "/v1/models")
    data = models.get("data")
    if not isinstance(data, list) or not data:
        raise ConfigError("the server lists no model; name one with --model")
    return str(data[0]["id"])


def _body(model: str, rng: random.Random, words: int, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": " ".join(rng.choice(_WORDS) for _ in range(words)),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _delays(rng: random.Random, rate: float, count: int) -> list[float]:
    if rate <= 0:
        return [0.0] * count
    now, delays = 0.0, []
    for _ in range(count):
        delays.append(now)
        now += rng.expovariate(rate)
    return delays


def _report(
    args: argparse.Namespace, model: str, timings: Sequence[Timing], seconds: float
) -> dict[str, Any]:
    good = [t for t in timings if not t.error]
    errors = [t.error for t in timings if t.error]
    tpots = [t.tpot for t in good if t.tpot is not None]
    output_tokens = sum(t.output_tokens for t in good)
    prompt_tokens = sum(t.prompt_tokens for t in good)
    return {
        "model": model,
        "requests": len(timings),
        "failed": len(errors),
        "errors": errors[:3],
        "concurrency": args.concurrency,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        "ttft_seconds": summary([t.ttft for t in good]),
        "itl_seconds": summary([gap for t in good for gap in t.itl()]),
        "tpot_seconds": summary(tpots),
        "e2e_seconds": summary([t.e2e for t in good]),
    }


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Returns mean and percentiles; None where there is nothing."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    ordered = sorted(values)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": percentile(0.5), "p90": percentile(0.9), "p99": percentile(0.99)}


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}: {report['requests']} requests, {report['concurrency']} at once, "
        f"{report['seconds']:.1f} s, {report['failed']} failed",
        *(f"  {error}" for error in report["errors"]),
        f"{report['output_tokens_per_second']:.1f} output tok/s, "
        f"{report['prompt_tokens_per_second']:.1f} prompt tok/s, "
        f"{report['requests_per_second']:.2f} requests/s",
        f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        values = report[f"{name}_seconds"].values()
        cells = ("-" if v is None else f"{v * 1000:.1f}" for v in values)
        lines.append(f"{name.upper():<6}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
