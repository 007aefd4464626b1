"""One test per case, and the fuzzer."""

from __future__ import annotations

import time

import pytest

from leadframe.conformance.case import Case
from leadframe.conformance.execute import execute
from leadframe.conformance.fuzz import FUZZ
from leadframe.conformance.kit import Kit
from leadframe.conformance.pytest_plugin import Run


def test_case(conformance_case: Case, conformance_kit: Kit, conformance_run: Run) -> None:
    result = execute(conformance_kit, conformance_case)
    conformance_run.results.append(result)
    if result.outcome == "not claimed":
        pytest.skip(result.reason)
    if result.outcome == "expected failure":
        pytest.xfail(result.reason)
    if result.outcome == "failed":
        pytest.fail(f"{result.reason}\nrepeat: {result.rerun}", pytrace=False)


def test_fuzz(conformance_kit: Kit, conformance_run: Run) -> None:
    seconds, first = conformance_run.fuzz_seconds, conformance_kit.seed
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        conformance_kit.seed = first + tried
        tried += 1
        result = execute(conformance_kit, FUZZ)
        if result.outcome == "failed":
            conformance_run.results.append(result)
            conformance_kit.seed = first
            pytest.fail(f"{result.reason}\nrepeat: {result.rerun}", pytrace=False)
    conformance_kit.seed = first
