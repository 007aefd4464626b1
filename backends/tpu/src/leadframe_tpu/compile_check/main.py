"""`leadframe compile-check tpu`: compiles steps for TPUs that are not here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from leadframe_tpu.compile_check.environment import (
    DEFAULT_TARGETS,
    has_compiler,
    prepare_environment,
)

if TYPE_CHECKING:
    from leadframe_tpu.compile_check.check import Verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check.

    Args:
      argv: the arguments after `leadframe compile-check tpu`.

    Returns:
      0 if every step is as it must be, 1 if one is not, or if a target was named and only lowered.

    Raises:
      ConfigError: a target does not exist.
    """
    prepare_environment()
    args = _parser().parse_args(argv)
    verdicts = _run(args)
    from leadframe_tpu.compile_check.report import as_json, format_matrix

    text = json.dumps(as_json(verdicts), indent=2) if args.json else format_matrix(verdicts)
    sys.stdout.write(text + "\n")
    # Who names a chip asks for a compilation; lowering knows nothing of chips.
    is_answered = has_compiler() or not args.target
    return 0 if is_answered and all(verdict.is_good for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    from leadframe_tpu.compile_check.cases import MODELS, STEPS

    parser = argparse.ArgumentParser(
        prog="leadframe compile-check tpu",
        description="Compile the kernels and full steps for TPUs that are not here, with libtpu's "
        "ahead-of-time compiler, and check what came out: kernels present, no copy of the cache "
        "or of a weight, the whole cache donated, memory within the chip.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--target", action="append", help=f"chip and topology; default {' '.join(DEFAULT_TARGETS)}")
    add("--model", action="append", choices=MODELS, help="model shape; default llama-3-8b")
    add("--step", action="append", choices=STEPS, help="default both")
    add("--tensor-parallel-size", action="append", type=int, help="chips a model; default 1 and 4")
    add("--layers", type=int, help="layers of a model to compile; default 2")
    add("--json", action="store_true", help="print the matrix as JSON")
    return parser


def _run(args: argparse.Namespace) -> list[Verdict]:
    from leadframe_tpu.compile_check.cases import STEPS, cases
    from leadframe_tpu.compile_check.check import check_step
    from leadframe_tpu.compile_check.targets import lowering_target, open_target

    if has_compiler():
        targets = [open_target(name) for name in args.target or DEFAULT_TARGETS]
    else:
        targets = [lowering_target(name) for name in args.target or ["any"]]
    verdicts = []
    for target in targets:
        for case in cases(args.model or ["llama-3-8b"], args.step or STEPS, args.layers):
            most = min(case.max_ranks or len(target.devices), len(target.devices))
            for ranks in args.tensor_parallel_size or (1, 4):
                if ranks <= most:
                    _note(f"{target.name} x{ranks}: {case.name}")
                    verdicts.append(check_step(case, target, ranks))
    return verdicts


def _note(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"compiling for {text}\n")
