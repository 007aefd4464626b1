"""The kit as a pytest plugin: options, the kit fixture, one test per case, the report."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from leadframe.conformance.case import TIERS, Case, Tier, in_tier, matches
from leadframe.conformance.evidence import Evidence
from leadframe.conformance.execute import Result
from leadframe.conformance.groups import all_cases
from leadframe.conformance.groups.a_hygiene import probe
from leadframe.conformance.kit import Kit
from leadframe.conformance.open_kit import choose, open_kit
from leadframe.conformance.report import build_report, write_report
from leadframe.errors import LeadframeError
from leadframe.platform import Selection


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
      conclusion: one line with the verdict and what it rests on; set when the cases have run.
    """

    cases: list[Case]
    tier: Tier
    fuzz_seconds: float
    report: Path | None
    results: list[Result] = field(default_factory=list)
    kit: Kit | None = None
    conclusion: str = ""
    started: float = field(default_factory=time.perf_counter)


RUN = pytest.StashKey[Run]()
_CHOSEN = pytest.StashKey[tuple[Selection, str]]()


class Choice:
    """A plugin that says which device has been chosen already.

    Args:
      chosen: what `choose` returned.
    """

    def __init__(self, chosen: tuple[Selection, str]) -> None:
        self._chosen = chosen

    def pytest_configure(self, config: pytest.Config) -> None:
        """Hands it over."""
        config.stash[_CHOSEN] = self._chosen


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
    group.addoption(
        "--require-hardware", action="store_true", help="fail unless it ran on the device itself"
    )


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def pytest_configure(config: pytest.Config) -> None:
    """Selects the cases."""
    tier = cast(Tier, config.getoption("--tier"))
    patterns = config.getoption("--case")
    named = [c for c in all_cases() if not patterns or any(matches(c.id, p) for p in patterns)]
    cases = in_tier(named, tier)
    if not cases:
        raise pytest.UsageError(_no_case(patterns, named))
    config.stash[RUN] = Run(cases, tier, config.getoption("--fuzz"), config.getoption("--report"))


def _no_case(patterns: list[str], named: list[Case]) -> str:
    """What to say when a tier has none of the cases that were asked for."""
    asked = ", ".join(patterns)
    if not named:
        return f"no case matches {asked}"
    tiers = [tier for tier in TIERS if any(case.tier == tier for case in named)]
    return f"{asked}: no such case in this tier; add --tier {tiers[0]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the fuzzer out unless it was given time."""
    if not config.stash[RUN].fuzz_seconds:
        items[:] = [item for item in items if item.name != "test_fuzz"]


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
    kit = _open(request.config)
    conformance_run.kit = kit
    yield kit
    level = _conclude(conformance_run, kit)
    kit.close()
    if request.config.getoption("--require-hardware") and level != "hardware":
        pytest.fail(f"--require-hardware: the evidence is {level!r}", pytrace=False)


def _open(config: pytest.Config) -> Kit:
    device = config.getoption("--device")
    if not device:
        pytest.exit("name the platform under test with --device NAME", returncode=2)
    try:
        chosen = config.stash.get(_CHOSEN, None)
        if chosen is None:  # pytest was called without `leadframe conformance`
            chosen = choose(device, require_hardware=config.getoption("--require-hardware"))
        options, seed = config.getoption("--option"), config.getoption("--seed")
        kit = open_kit(device, options, seed, chosen=chosen)
        first_use(kit, config.stash[RUN].cases)
    except LeadframeError as error:
        pytest.exit(str(error), returncode=error.exit_code)
    if kit.stand_in:
        _say(config, f"{kit.stand_in}\nso the kit runs on {kit.device}")
    return kit


def first_use(kit: Kit, cases: Sequence[Case]) -> None:
    """Opens the backend; the process that loads the plugin afresh for group A comes before.

    Some devices serve one process at a time, and that one must not be this.
    """
    if any(case.group == "A" for case in cases):
        with suppress(Exception):  # the cases will meet it again
            probe(kit)
    _ = kit.backend


def _say(config: pytest.Config, text: str) -> None:
    """Writes at once, past the capture of the case that the kit is opened for."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _conclude(run: Run, kit: Kit) -> Evidence:
    """Writes the report, and the line that says what was proved."""
    seconds = time.perf_counter() - run.started
    report = build_report(kit, run.results, run.tier, seconds)
    if run.report is not None:
        write_report(report, run.report)
    run.conclusion = (
        f"{kit.device}: {run.tier} tier {report['verdict']}; "
        f"evidence: {report['evidence']} ({report['observation']})"
    )
    level: Evidence = report["evidence"]
    return level


def not_claimed(results: Sequence[Result]) -> list[str]:
    """Returns one line for each reason why cases were left out."""
    reasons = Counter(result.reason for result in results if result.outcome == "not claimed")
    return [f"not claimed, cases left out: {count}: {why}" for why, count in reasons.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was proved, and the command that repeats each failure."""
    run = terminalreporter.config.stash[RUN]
    failed = [result for result in run.results if result.outcome == "failed"]
    if failed:
        terminalreporter.section("to repeat a failure")
        for result in failed:
            terminalreporter.write_line(result.rerun)
    for line in not_claimed(run.results):
        terminalreporter.write_line(line)
    if run.conclusion:
        terminalreporter.write_line(run.conclusion)
    if run.report is not None and run.kit is not None:
        terminalreporter.write_line(f"report: {run.report} and {run.report.with_suffix('.html')}")
