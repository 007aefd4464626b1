"""Fixtures of the TPU tests. Nothing here needs a TPU: kernels are interpreted on the host."""

from __future__ import annotations

import pytest

from leadframe.conformance.kit import Kit
from leadframe.conformance.open_kit import open_kit
from leadframe_tpu.compile_check.environment import prepare_environment

prepare_environment()  # before any test module imports JAX


@pytest.fixture(scope="session")
def kit() -> Kit:
    """The conformance kit over interpreted kernels: problems, and their float64 oracle."""
    return open_kit("tpu:interpreter")
