"""`leadframe bench throughput`: output tokens a second, and the ratio to a peer in the same run.

Rounds of Leadframe and of the peer alternate, each in a process of its own, and medians are
compared: these figures hold for one machine on one day, and their ratio is what travels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from leadframe.bench.arguments import count
from leadframe.bench.load_guard import LoadGuard, disturbance
from leadframe.bench.peer import TRANSFORMERS, Peer, median, split_command
from leadframe.bench.workloads import Workload, make_workload
from leadframe.llm import LLM
from leadframe.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """One timed run of a workload.

    Attributes:
      engine: who ran it.
      seconds: wall time from the first request in to the last token out.
      output_tokens_per_second: generated tokens over `seconds`.
      foreign_fraction: share of the machine that others used meanwhile.
    """

    engine: str
    seconds: float
    output_tokens_per_second: float
    foreign_fraction: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark to those of every benchmark."""
    parser.add_argument(
        "--workload",
        choices=("single", "batch", "prefix"),
        default=None,
        help="one workload only; both single and batch are run otherwise",
    )
    parser.add_argument("--rounds", type=count, default=3, help="timed rounds of each engine")
    parser.add_argument("--num-requests", type=count, default=None, help="requests in a workload")
    parser.add_argument("--max-tokens", type=count, default=None, help="tokens to generate each")
    parser.add_argument(
        "--compare",
        default="transformers",
        metavar="PEER",
        help='who runs the same prompts: "transformers", "none", or the command of a program that '
        "speaks as leadframe.bench.peer says, such as bench/llama_cpp_peer.py",
    )


def run_leadframe(llm: LLM, workload: Workload) -> tuple[Round, list[list[int]]]:
    """Runs a workload on an engine whose prefix cache is empty.

    Returns:
      The timing, and the tokens of each request.
    """
    llm.engine.reset_prefix_cache()
    params = SamplingParams(
        temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True, detokenize=False
    )
    guard = LoadGuard()
    completions = llm.generate(workload.prompts, params)
    return _round("leadframe", workload, guard), [c.token_ids for c in completions]


def run_peer(peer: Peer, workload: Workload) -> tuple[Round, list[list[int]]]:
    """Runs a workload on a peer."""
    guard = LoadGuard(peer.pid)
    tokens = peer.run(workload)
    return _round("peer", workload, guard), tokens


def _round(engine: str, workload: Workload, guard: LoadGuard) -> Round:
    sample = guard.sample()
    rate = workload.num_output_tokens / sample.seconds
    return Round(engine, sample.seconds, rate, sample.foreign_fraction)


def measure(llm: LLM, peer: Peer | None, workload: Workload, rounds: int) -> dict[str, Any]:
    """Alternates rounds and returns a row with stable keys."""
    own: list[Round] = []
    theirs: list[Round] = []
    agreement = None
    run_leadframe(llm, make_warm_up(workload))
    if peer is not None:
        run_peer(peer, make_warm_up(workload))
    for number in range(1, rounds + 1):
        timing, tokens = run_leadframe(llm, workload)
        own.append(timing)
        _report_round(workload, timing, number, rounds)
        if peer is not None:
            timing, peer_tokens = run_peer(peer, workload)
            theirs.append(timing)
            _report_round(workload, timing, number, rounds)
            agreement = _agreement(tokens, peer_tokens)
    return _row(workload, own, theirs, agreement)


def _report_round(workload: Workload, timing: Round, number: int, rounds: int) -> None:
    """Shows how far the benchmark has come: on stderr, so that stdout stays the result."""
    print(
        f"{workload.name}, round {number} of {rounds}: {timing.engine}, {timing.seconds:.1f} s, "
        f"{timing.output_tokens_per_second:.1f} tok/s",
        file=sys.stderr,
        flush=True,
    )


def make_warm_up(workload: Workload) -> Workload:
    """Returns a short workload of the same shape."""
    return Workload(workload.name, workload.prompts[:2], 2)


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens that agree before the first difference of each request."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        total += len(mine)
        for a, b in zip(mine, other, strict=True):
            if a != b:
                break
            same += 1
    return same / total if total else 1.0


def _row(
    workload: Workload, own: list[Round], theirs: list[Round], agreement: float | None
) -> dict[str, Any]:
    rate = median([r.output_tokens_per_second for r in own])
    row: dict[str, Any] = {
        "workload": workload.name,
        "requests": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "output_tokens_per_second": rate,
        "peer_output_tokens_per_second": None,
        "ratio": None,
        "token_agreement": agreement,
        "rounds": [asdict(r) for r in (*own, *theirs)],
    }
    if theirs:
        peer_rate = median([r.output_tokens_per_second for r in theirs])
        row["peer_output_tokens_per_second"], row["ratio"] = peer_rate, rate / peer_rate
    return row


def run(args: argparse.Namespace, llm: LLM) -> int:
    """Runs the benchmark on a loaded model and prints what it measured."""
    names = [args.workload] if args.workload else ["single", "batch"]
    vocab_size = llm.engine.model_info.vocab_size
    peer = _start_peer(args, llm)
    try:
        rows = []
        for name in names:
            workload = make_workload(
                name, vocab_size, num_requests=args.num_requests, max_tokens=args.max_tokens
            )
            rows.append(measure(llm, peer, workload, args.rounds))
    finally:
        if peer is not None:
            peer.close()
    report = {
        "engine": llm.engine.device_summary,
        "peer": peer.name if peer is not None else None,
        "rows": rows,
    }
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _start_peer(args: argparse.Namespace, llm: LLM) -> Peer | None:
    if args.compare == "none":
        return None
    is_known = args.compare == "transformers"
    command = TRANSFORMERS if is_known else split_command(args.compare)
    threads = len(os.sched_getaffinity(0))
    return Peer(command, str(llm.engine.model_path), threads)


def _table(report: dict[str, Any]) -> str:
    lines = [f"leadframe on {report['engine']}"]
    if report["peer"]:
        lines.append(f"peer: {report['peer']}, same prompts, same file of weights")
    head = f"{'workload':<10}{'requests':>9}{'tokens':>8}{'leadframe tok/s':>17}"
    lines.append(head + (f"{'peer tok/s':>12}{'ratio':>8}" if report["peer"] else ""))
    for row in report["rows"]:
        line = (
            f"{row['workload']:<10}{row['requests']:>9}{row['output_tokens']:>8}"
            f"{row['output_tokens_per_second']:>17.1f}"
        )
        if row["ratio"] is not None:
            line += f"{row['peer_output_tokens_per_second']:>12.1f}{row['ratio']:>8.2f}"
        lines.append(line)
        mark = disturbance([r["foreign_fraction"] for r in row["rounds"]])
        if mark:
            lines.append(f"  {mark}")
    return "\n".join(lines)
