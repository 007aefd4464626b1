"""What a case works with: the backend under test, the oracle, tolerances and random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from leadframe.conformance.case import ConformanceFailure, matches
from leadframe.platform import (
    KV,
    Array,
    Backend,
    CompiledStep,
    ConformanceNotes,
    KernelImpl,
    Ops,
    OpSpec,
    OpTable,
    Plugin,
    StepBatch,
    StepFunction,
    build_op_table,
    reference_ops,
)
from leadframe.platform.reference.namespace import numpy_namespace

if TYPE_CHECKING:
    from leadframe.conformance.rank_group import Ranks

ORACLE = reference_ops(numpy_namespace(), f32=np.float64)
"""The definition of every op, in float64."""

_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_STEPS = {"attention": 24.0, "linear": 24.0, "sample": 8.0}
_DEFAULT_STEPS = 12.0


@dataclass(eq=False)
class Kit:
    """One backend under test.

    Attributes:
      open: creates a further backend for the same device.
      device: what the user wrote, for the re-run line.
      stand_in: why the device is the platform's interpreter and not its silicon; "" when the
        user named it.
      plugin: the plugin, when there is one.
      kernels: extra kernels for its op table.
      notes: what the plugin says about itself.
      seed: base of all random numbers.
      metrics: measurements of the running case; goes into the report.
      case_id: the running case.
      options: KEY=VALUE texts that the backend was created with.
      probe_args: what loads the same plugin in a fresh process; empty when there is none.
      probe_report: what that process reported.
      ranks: the group of ranks that cases share; see `leadframe.conformance.rank_group`.
    """

    open: Callable[[], Backend]
    device: str = "?"
    stand_in: str = ""
    plugin: Plugin | None = None
    kernels: tuple[KernelImpl, ...] = ()
    notes: ConformanceNotes = field(default_factory=ConformanceNotes)
    seed: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    case_id: str = ""
    options: tuple[str, ...] = ()
    probe_args: tuple[str, ...] = ()
    probe_report: dict[str, Any] = field(default_factory=dict)
    ranks: Ranks | None = None
    _tables: dict[OpSpec, OpTable] = field(default_factory=dict)

    @cached_property
    def backend(self) -> Backend:
        """The backend that cases share."""
        return self.open()

    @cached_property
    def table(self) -> OpTable:
        """Its op table."""
        return build_op_table(self.backend, kernels=self.kernels, platform=self.device)

    @property
    def ops(self) -> Ops:
        """The op table of a model that says nothing about its attention."""
        return cast(Ops, self.table)

    def ops_for(self, spec: OpSpec) -> Ops:
        """The op table of a model whose attention asks for `spec`."""
        if not self.kernels:
            return self.ops
        if spec not in self._tables:
            self._tables[spec] = build_op_table(
                self.backend, [spec], self.kernels, platform=self.device
            )
        return cast(Ops, self._tables[spec])

    @property
    def rng(self) -> np.random.Generator:
        """A generator that depends on the seed and the case, and on nothing else."""
        return np.random.default_rng([self.seed, zlib.crc32(self.case_id.encode())])

    @property
    def dtype(self) -> str:
        """The dtype that the backend likes best."""
        return self.backend.caps.compute_dtypes[0]

    @property
    def is_static(self) -> bool:
        """Whether steps run from a recording or an executable."""
        return self.backend.caps.graph != "none"

    def close(self) -> None:
        """Closes the shared backend and ends the ranks."""
        if self.ranks is not None:
            self.ranks.close()
        self.backend.close()

    def check(self, condition: bool, message: str) -> None:
        """Fails the case with a message unless the condition holds."""
        if not condition:
            raise ConformanceFailure(message)

    def put(self, host: npt.NDArray[Any], dtype: str | None = None) -> tuple[Array, Any]:
        """Uploads an array.

        Returns:
          The device array, and the same values in float64 after rounding to its dtype.
        """
        array = self.backend.upload(np.ascontiguousarray(host), dtype)
        return array, np.asarray(self.backend.download(array)).astype(np.float64)

    def get(self, array: Array) -> npt.NDArray[Any]:
        """Downloads an array."""
        return np.asarray(self.backend.download(array))

    def compile(
        self,
        step: StepFunction,
        batch: StepBatch,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = False,
    ) -> CompiledStep:
        """Makes a step ready for a batch's bucket."""
        return self.backend.compile(step, batch.bucket, weights, kv, capture)

    def run(
        self,
        step: StepFunction,
        batch: StepBatch,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = False,
    ) -> tuple[dict[str, npt.NDArray[Any]], KV]:
        """Compiles a step, runs it once and downloads its outputs."""
        compiled = self.compile(step, batch, weights, kv, capture)
        outputs, kv = compiled.run(batch, kv)
        host = {name: self.get(value) for name, value in outputs.items()}
        compiled.close()
        return host, kv

    def tolerance(self, op: str, dtype: str) -> float:
        """Returns the error allowed, relative to the largest magnitude of the exact result.

        A number of roundings of the dtype; a plugin may ask for more, with a reason, up to
        ten times.
        """
        default = _STEPS.get(op, _DEFAULT_STEPS) * _ROUNDING[dtype]
        for key in (f"{op}/{dtype}", op):
            if key in self.notes.tolerances:
                return min(self.notes.tolerances[key][0], 10 * default)
        return default

    def close_to(
        self, op: str, got: npt.NDArray[Any], exact: npt.NDArray[Any], dtype: str | None = None
    ) -> None:
        """Fails unless a result is within the tolerance of the exact one."""
        dtype = dtype or self.dtype
        if got.shape != exact.shape:
            raise ConformanceFailure(f"{op}: shape {got.shape}, expected {exact.shape}")
        if not np.isfinite(got).all():
            where = _first(~np.isfinite(got))
            raise ConformanceFailure(f"{op}: not finite at {where}, expected {exact[where]:.6g}")
        error = np.abs(got.astype(np.float64) - exact)
        scale = float(np.abs(exact).max(initial=1e-30))
        limit = self.tolerance(op, dtype)
        self.metrics["error"] = max(self.metrics.get("error", 0.0), float(error.max() / scale))
        self.metrics["tolerance"] = limit
        if error.max(initial=0.0) > limit * scale:
            where = _first(error == error.max())
            raise ConformanceFailure(
                f"{op} in {dtype}: {got[where]:.8g} at {where}, expected "
                f"{exact[where]:.8g}; relative error {error.max() / scale:.2e}, limit {limit:.2e}"
            )

    def same(self, what: str, got: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
        """Fails unless two arrays hold the same values, NaN equal to NaN."""
        if got.shape != want.shape:
            raise ConformanceFailure(f"{what}: shape {got.shape}, expected {want.shape}")
        differs = ~((got == want) | ((got != got) & (want != want)))
        if differs.any():
            where = _first(differs)
            raise ConformanceFailure(
                f"{what}: {got[where]} at {where}, expected {want[where]}; "
                f"{int(differs.sum())} of {differs.size} differ"
            )

    def raises(self, kind: type[Exception], what: str, function: Callable[[], object]) -> Exception:
        """Fails unless a call raises that error."""
        try:
            result = function()
        except kind as error:
            return error
        except Exception as error:
            raise ConformanceFailure(
                f"{what}: raised {type(error).__name__} ({error}), expected {kind.__name__}"
            ) from error
        shown = f"{result!r}"[:80]
        raise ConformanceFailure(f"{what}: returned {shown}, expected {kind.__name__}")

    def expected_failure(self, case_id: str) -> str | None:
        """Returns the plugin's reason for a failure that it announced."""
        return _noted(self.notes.expected_failures, case_id)

    def noted_unsupported(self, case_id: str) -> str | None:
        """Returns the plugin's reason for a case that it calls unsupported."""
        return _noted(self.notes.unsupported, case_id)


def _noted(notes: Mapping[str, str], case_id: str) -> str | None:
    return next((why for pattern, why in notes.items() if matches(case_id, pattern)), None)


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.argwhere(mask)[0])


__all__ = ["ORACLE", "Kit"]
