"""`leadframe conformance DEVICE` and `leadframe conformance verify REPORT`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from leadframe.conformance.case import TIERS
from leadframe.errors import LeadframeError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the kit, or checks a report; returns the exit code.

    Args:
      argv: the arguments after `leadframe conformance`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["verify"]:
        return _verify(argv[1:])
    return _run(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leadframe conformance",
        description="Proves a platform against the contract; `verify REPORT` re-checks a report.",
    )
    parser.add_argument("device", help="NAME[:INDEX] of an installed platform")
    parser.add_argument(
        "--require-hardware",
        action="store_true",
        help="fail unless it ran on the device itself; without it, a platform that is named "
        "without an index and has no device here is proved on its interpreter",
    )
    parser.add_argument("--tier", choices=TIERS, default="core")
    parser.add_argument("--fuzz", metavar="SECONDS", default="0", help="try random problems")
    parser.add_argument("--report", type=Path, help="write JSON, a page and JUnit beside it")
    parser.add_argument("--case", action="append", default=[], help="id, prefix or glob")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per case")
    return parser


def _run(args: argparse.Namespace) -> int:
    try:
        import pytest
    except ImportError:
        sys.stderr.write(
            "the kit needs pytest and others; from a checkout of Leadframe: "
            "pip install './core[conformance]'\n"
        )
        return 2
    from leadframe.conformance.open_kit import choose
    from leadframe.conformance.pytest_plugin import Choice

    try:
        chosen = choose(args.device, require_hardware=args.require_hardware)
    except LeadframeError as error:  # here it is one plain line; pytest would frame it
        sys.stderr.write(f"leadframe: {error}\n")
        return error.exit_code
    return int(pytest.main(_pytest_arguments(args), plugins=[Choice(chosen)]))


def _pytest_arguments(args: argparse.Namespace) -> list[str]:
    """The same run as pytest arguments, without any configuration of the folder it starts in."""
    suite = Path(__file__).parent / "suite"
    out = [
        str(suite),
        "-c",
        os.devnull,
        "--rootdir",
        str(suite),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
    ]
    out += ["-p", "leadframe.conformance.pytest_plugin", "-p", "no:asyncio", "--tb=short"]
    out += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    out += ["-v"] if args.verbose else ["-q", "-rf"]
    out += ["--device", args.device, "--tier", args.tier, "--seed", str(args.seed)]
    out += ["--fuzz", args.fuzz]
    for name in ("case", "option"):
        out += [text for value in getattr(args, name) for text in (f"--{name}", value)]
    out += ["--require-hardware"] if args.require_hardware else []
    if args.report is not None:
        path = args.report.absolute()
        out += ["--report", str(path), f"--junitxml={path.with_suffix('.xml')}"]
    return out


def _verify(argv: Sequence[str]) -> int:
    from leadframe.conformance.report import verify

    parser = argparse.ArgumentParser(prog="leadframe conformance verify")
    parser.add_argument("report", type=Path)
    path = parser.parse_args(argv).report
    try:
        report = json.loads(path.read_text())
        problems = verify(report)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{path} cannot be read: {error}\n")
        return 2
    except (AttributeError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"{path} has not the shape of a report ({what})\n")
        return 2
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    if problems:
        return 1
    line = f"{report['device']}: {report['tier']} tier {report['verdict']}, {report['evidence']}"
    if report["verdict"] == "partial":
        line += " (narrowed to some cases: it proves nothing about the others)"
    sys.stdout.write(f"{line}; the report obeys the rules\n")
    return 0 if report["verdict"] == "conformant" else 1


__all__ = ["main"]
