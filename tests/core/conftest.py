"""Fixtures that several tests of the core share."""

import array_api_strict
import numpy as np
import pytest

from leadframe.platform import ArrayNamespace


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
