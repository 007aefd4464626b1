"""Compiles cases for a target and judges them, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from leadframe_triton.arch import Arch
from leadframe_triton.compile_check.cases import Case
from leadframe_triton.compile_check.driver import Launch, Recorder, compile_only
from leadframe_triton.compile_check.gate import Row, judge
from leadframe_triton.compile_check.resources import resources_of
from leadframe_triton.launch import LaunchContext


def check(arch: Arch, cases: Iterable[Case]) -> Iterator[Row]:
    """Yields the rows of each case, as it is compiled."""
    context = LaunchContext(arch)
    with compile_only(arch) as recorder:
        for case in cases:
            yield from _check_case(context, case, recorder)


def _check_case(context: LaunchContext, case: Case, recorder: Recorder) -> Iterator[Row]:
    arch = context.arch
    start = time.perf_counter()
    try:
        case.launch(context, 0)
    except Exception as error:  # any compiler failure is a row of the report, not its end
        recorder.take()
        problem = f"does not compile: {type(error).__name__}: {str(error).strip()[:300]}"
        yield Row(case.kernel, case.config, arch.name, problems=(problem,))
        return
    seconds = time.perf_counter() - start
    first = recorder.take()
    case.launch(context, 1)
    again = [launch.kernel for launch in recorder.take() if launch.is_new]
    rows = [_row(case, arch, launch, seconds) for launch in first]
    if again:
        problem = f"compiled again for other lengths: {', '.join(again)}"
        rows.append(Row(case.kernel, case.config, arch.name, problems=(problem,)))
    yield from rows


def _row(case: Case, arch: Arch, launch: Launch, seconds: float) -> Row:
    kernel = launch.kernel.removesuffix("_kernel")
    return judge(kernel, case, arch, resources_of(launch.compiled, arch), seconds)
