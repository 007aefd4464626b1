"""`leadframe bench NAME`: the benchmarks of `leadframe.bench`.

A benchmark is a module with `add_arguments(parser)` and `run`. One that measures an engine takes
`run(args, llm)` with a model that is loaded already; the others take `run(args)`. `args.json` says
whether to print JSON with stable keys.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

from leadframe.cli.engine_args import (
    add_engine_arguments,
    announce_device,
    engine_config,
    engine_settings,
    parse_with_config_file,
)
from leadframe.cli.parser import Parser, add_field
from leadframe.config import EngineConfig
from leadframe.errors import ConfigError
from leadframe.platform.names import did_you_mean

BENCHMARKS: Final = {
    "throughput": "output tokens a second of an engine, against Transformers",
    "latency": "TTFT, ITL and TPOT of one stream on an engine in this process",
    "serve": "TTFT, ITL, TPOT and throughput of a running server",
    "startup": "time from the command to the first request",
    "scheduler": "microseconds a step of scheduling, without a model",
    "host": "microseconds between two steps of a device that computes nothing",
}
_WITH_ENGINE: Final = frozenset({"throughput", "latency"})


def run(argv: Sequence[str]) -> int:
    """Runs one benchmark."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    name = argv[0]
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS) or f"; there are {', '.join(BENCHMARKS)}"
        raise ConfigError(f"there is no benchmark {name!r}{hint}")
    module = importlib.import_module(f"leadframe.bench.{name}")
    parser = Parser(prog=f"leadframe bench {name}", description=_sentence(BENCHMARKS[name]))
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")
    module.add_arguments(parser)
    if name in _WITH_ENGINE:
        return _run_with_engine(module.run, parser, argv[1:])
    status: int = module.run(parser.parse(argv[1:]))
    return status


def _sentence(text: str) -> str:
    """Makes a sentence of a phrase; `str.capitalize` would write TTFT as "Ttft"."""
    return f"{text[0].upper()}{text[1:]}."


def _help() -> str:
    lines = ["usage: leadframe bench NAME [options]", ""]
    lines += [f"  {name:<12}{text}" for name, text in BENCHMARKS.items()]
    return "\n".join(lines)


def _run_with_engine(benchmark: Callable[..., int], parser: Parser, argv: Sequence[str]) -> int:
    """Loads the model that the flags describe, and hands it to a benchmark."""
    add_field(parser, EngineConfig, "model", "model", nargs="?", metavar="MODEL")
    add_engine_arguments(parser)
    args = parse_with_config_file(parser, argv)
    announce_device(engine_config(args), sys.stderr)

    from leadframe.cli.progress import progress_bar
    from leadframe.llm import LLM

    with progress_bar("loading weights", is_bytes=True) as progress:
        llm = LLM(progress=progress, **engine_settings(args))
    with llm:
        return benchmark(args, llm)
