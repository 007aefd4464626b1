"""Doubles of Intel's libraries, and op cases, for the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(name):
    """Loads a neighbour: with importlib imports, tests have no package to import it from."""
    full = f"leadframe_xpu_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def doubles():
    return _load("doubles")


@pytest.fixture(scope="session")
def cases():
    return _load("cases")


@pytest.fixture(scope="session")
def misuse():
    return _load("misuse")


def pytest_generate_tests(metafunc):
    for name, table in (("case_name", "cases.CASES"), ("misuse_name", "misuse.MISUSE")):
        if name in metafunc.fixturenames:
            module, _, attribute = table.partition(".")
            metafunc.parametrize(name, list(getattr(_load(module), attribute)))


@pytest.fixture
def case(case_name, cases):
    return cases.CASES[case_name]


@pytest.fixture(scope="session")
def make_backend():
    """Builds a backend on the host around kernels; None takes torch's attention."""
    from leadframe_torch import HostLayer
    from leadframe_xpu.backend import XpuBackend
    from leadframe_xpu.ranking import Ranking

    def make(kernels):
        name = "torch" if kernels is None else kernels.facts.name
        return XpuBackend(HostLayer(), kernels, Ranking("gpu", name, ()))

    return make
