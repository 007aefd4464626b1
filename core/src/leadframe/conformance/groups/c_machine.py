"""Group C: a state machine against a NumPy pool; a failure is shrunk to the shortest sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.case import Case, ConformanceFailure
from leadframe.conformance.groups.c_memory import canonical_shape, kv_spec
from leadframe.conformance.kit import Kit

_BLOCKS = 6
_EXAMPLES, _STEPS = 25, 20


def _machine(kit: Kit) -> Any:
    """Returns the state machine class for one backend; Hypothesis is needed only here."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

    spec = kv_spec(kit)
    layers = st.integers(0, len(spec.layers) - 1)
    block_ids = st.lists(st.integers(0, _BLOCKS - 1), min_size=1, max_size=4, unique=True)

    class Pool(RuleBasedStateMachine):
        """One KV cache and what it must hold."""

        def __init__(self) -> None:
            super().__init__()
            self.kv: list[Any] = []
            self.model: list[npt.NDArray[np.float64]] = []
            self.written = 0

        @rule()
        def allocate(self) -> None:
            self.teardown()
            self.kv = kit.backend.kv_alloc(spec, _BLOCKS)
            self.model = [np.zeros(canonical_shape(spec, i, _BLOCKS)) for i in range(len(self.kv))]

        @precondition(lambda self: self.kv)
        @rule(layer=layers, ids=block_ids)
        def write(self, layer: int, ids: list[int]) -> None:
            self.written += 1
            size = int(np.prod(canonical_shape(spec, layer, len(ids))))
            data = (np.arange(size) + self.written) % 251.0
            data = data.reshape(canonical_shape(spec, layer, len(ids)))
            self.kv[layer] = kit.backend.kv_write(self.kv[layer], ids, data.astype(np.float32))
            self.model[layer][ids] = data

        @precondition(lambda self: self.kv)
        @rule(layer=layers, ids=block_ids.filter(lambda ids: len(ids) % 2 == 0))
        def copy(self, layer: int, ids: list[int]) -> None:
            half = len(ids) // 2
            src, dst = np.array(ids[:half], np.int32), np.array(ids[half:], np.int32)
            self.kv[layer] = kit.ops.kv_copy(self.kv[layer], src, dst)
            self.model[layer][dst] = self.model[layer][src]

        @precondition(lambda self: self.kv)
        @rule(layer=layers, ids=block_ids)
        def read(self, layer: int, ids: list[int]) -> None:
            got = np.asarray(kit.backend.kv_read(self.kv[layer], ids)).astype(np.float64)
            kit.same("kv_read", got, self.model[layer][ids])

        @invariant()
        def holds_what_the_model_holds(self) -> None:
            for layer, want in zip(self.kv, self.model, strict=True):
                got = np.asarray(kit.backend.kv_read(layer, list(range(_BLOCKS))))
                kit.same("pool", got.astype(np.float64), want)

        def teardown(self) -> None:
            if self.kv:
                kit.backend.kv_free(self.kv)
            self.kv, self.model = [], []

    return Pool


def _run(kit: Kit) -> None:
    try:
        from hypothesis import HealthCheck, settings
        from hypothesis.stateful import run_state_machine_as_test
    except ModuleNotFoundError:  # pytest alone is enough for every other case
        raise ConformanceFailure(
            "this case needs Hypothesis, which is not installed; run: pip install hypothesis"
        ) from None

    run_state_machine_as_test(
        _machine(kit),
        settings=settings(
            max_examples=_EXAMPLES,
            stateful_step_count=_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


CASES = [Case("C.pool[shrinking]", _run, "full")]
