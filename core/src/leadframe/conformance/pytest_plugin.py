"""The kit as a pytest plugin: options, the kit fixture, one test per case, the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from leadframe.conformance.case import TIERS, Case, Tier, in_tier, matches
from leadframe.conformance.execute import Result
from leadframe.conformance.groups import all_cases
from leadframe.conformance.kit import Kit
from leadframe.conformance.open_kit import open_kit
from leadframe.conformance.report import build_report, write_report
from leadframe.errors import LeadframeError


@dataclass(slots=True)
class Run:
    """One run of the kit.

    Attributes:
      cases: the cases that were selected.
      tier: the tier that was asked for.
      fuzz_seconds: how long to try random problems.
      report: where the report goes.
      results: what became of the cases so far.
      kit: set once the device is open.
    """

    cases: list[Case]
    tier: Tier
    fuzz_seconds: float
    report: Path | None
    results: list[Result] = field(default_factory=list)
    kit: Kit | None = None
    started: float = field(default_factory=time.perf_counter)


RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the kit's options."""
    group = parser.getgroup("leadframe conformance")
    group.addoption("--device", help="NAME[:INDEX] of the platform under test")
    group.addoption("--tier", choices=TIERS, default="core", help="which cases run")
    group.addoption("--seed", type=int, default=0, help="base of all random numbers")
    group.addoption("--case", action="append", default=[], help="id, prefix or glob; repeatable")
    group.addoption("--fuzz", type=_seconds, default=0.0, help="seconds of random problems")
    group.addoption("--report", type=Path, help="write JSON here, and a page beside it")
    group.addoption("--option", action="append", default=[], help="KEY=VALUE of the platform")


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def pytest_configure(config: pytest.Config) -> None:
    """Selects the cases."""
    tier = cast(Tier, config.getoption("--tier"))
    patterns = config.getoption("--case")
    pool = all_cases() if patterns else in_tier(all_cases(), tier)
    cases = [c for c in pool if not patterns or any(matches(c.id, p) for p in patterns)]
    if not cases:
        raise pytest.UsageError(f"no case matches {', '.join(patterns)}")
    config.stash[RUN] = Run(cases, tier, config.getoption("--fuzz"), config.getoption("--report"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the fuzzer out unless it was given time."""
    if not config.stash[RUN].fuzz_seconds:
        idle = [item for item in items if item.name == "test_fuzz"]
        config.hook.pytest_deselected(items=idle)
        items[:] = [item for item in items if item not in idle]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case."""
    if "conformance_case" in metafunc.fixturenames:
        cases = metafunc.config.stash[RUN].cases
        metafunc.parametrize("conformance_case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Run:
    """The run that results are added to."""
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def conformance_kit(request: pytest.FixtureRequest, conformance_run: Run) -> Iterator[Kit]:
    """The kit on the device under test."""
    config = request.config
    if not config.getoption("--device"):
        pytest.exit("name the platform under test with --device NAME", returncode=2)
    try:
        kit = open_kit(
            config.getoption("--device"), config.getoption("--option"), config.getoption("--seed")
        )
        conformance_run.kit = kit
        _ = kit.backend
    except LeadframeError as error:
        pytest.exit(str(error), returncode=error.exit_code)
    yield kit
    if conformance_run.report is not None:
        seconds = time.perf_counter() - conformance_run.started
        report = build_report(kit, conformance_run.results, conformance_run.tier, seconds)
        write_report(report, conformance_run.report)
    kit.backend.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the command that repeats each failure."""
    run = terminalreporter.config.stash[RUN]
    failed = [result for result in run.results if result.outcome == "failed"]
    if failed:
        terminalreporter.section("to repeat a failure")
        for result in failed:
            terminalreporter.write_line(result.rerun)
    if run.report is not None and run.kit is not None:
        terminalreporter.write_line(f"report: {run.report} and {run.report.with_suffix('.html')}")
