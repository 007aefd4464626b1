"""Fixtures that several tests of the core share."""

import importlib.util
import os
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from leadframe.platform import ArrayNamespace

# Machines are shared: how long an example takes says nothing about the code. In CI the examples
# depend on the commit alone; everybody else's runs look for new ones.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("shared machine")


def _strict_put(buf, rows, cols, values):
    raw = np.array(buf._array)
    raw[rows._array, cols._array] = values._array
    return array_api_strict.asarray(raw)


def _strict_top_k(x, k):
    order = np.argsort(-x._array, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(x._array, order, axis=-1)
    return array_api_strict.asarray(values), array_api_strict.asarray(order.astype(np.int32))


@pytest.fixture(scope="session")
def strict_namespace():
    """The array API standard to the letter: what it refuses, some backend refuses."""
    return ArrayNamespace(array_api_strict, put=_strict_put, top_k=_strict_top_k)


@pytest.fixture(scope="session")
def policy():
    """The module policy_harness.py: scheduler, blocks and batches over a model that checks them."""
    return _module("policy_harness")


@pytest.fixture(scope="session")
def harness():
    """The module model_harness.py: tiny models of Transformers, and ours over the same weights."""
    return _module("model_harness")


def _module(name):
    spec = importlib.util.spec_from_file_location(
        f"leadframe_{name}", Path(__file__).with_name(f"{name}.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
