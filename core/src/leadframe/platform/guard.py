"""Stands between the core and a backend, so that no foreign exception reaches the core.

It costs one Python call per member and one per step: a `try` is free until something is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from leadframe.errors import BackendBug, ContractViolation, LeadframeError
from leadframe.platform.backend import MEMBERS, Backend, CompiledStep
from leadframe.platform.batch import StepBatch

_P = ParamSpec("_P")
_R = TypeVar("_R")


_STEP_MEMBERS = ("run", "close", "bytes", "compile_seconds", "capture_seconds", "cache_hit")


def _guarded(member: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except LeadframeError:
            raise
        except Exception as error:
            raise BackendBug(member, error) from error

    return call


class GuardedStep:
    """A compiled step whose foreign exceptions arrive as `BackendBug`."""

    __slots__ = ("_ops", "_run", "step")

    def __init__(self, step: CompiledStep, ops: Mapping[str, Any]) -> None:
        self.step = step
        self._run = step.run
        self._ops = ops

    @property
    def bytes(self) -> int:
        """Device memory that the step holds."""
        return self.step.bytes

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling."""
        return self.step.compile_seconds

    @property
    def capture_seconds(self) -> float:
        """Time spent capturing."""
        return self.step.capture_seconds

    @property
    def cache_hit(self) -> bool | None:
        """Whether a cache served the compilation."""
        return self.step.cache_hit

    def run(self, batch: StepBatch, kv_d: Any) -> Any:
        """Runs the step."""
        try:
            return self._run(batch, kv_d)
        except LeadframeError:
            raise
        except Exception as error:
            raise BackendBug(_blame(error, self._ops), error) from error

    def close(self) -> None:
        """Frees the step."""
        _guarded("CompiledStep.close", self.step.close)()


class GuardedBackend:
    """A validated backend whose foreign exceptions arrive as `BackendBug`.

    Attributes:
      unguarded: the plugin's own object.
    """

    memory: Callable[..., Any]
    upload: Callable[..., Any]
    download: Callable[..., Any]
    kv_block_bytes: Callable[..., Any]
    kv_alloc: Callable[..., Any]
    kv_free: Callable[..., Any]
    kv_read: Callable[..., Any]
    kv_write: Callable[..., Any]
    close: Callable[..., Any]

    def __init__(self, backend: Backend) -> None:
        self.unguarded = backend
        self.caps = backend.caps
        self.xp = backend.xp
        self.ops = backend.ops
        for member in MEMBERS:
            if member not in ("caps", "xp", "ops", "compile"):
                setattr(self, member, _guarded(member, getattr(backend, member)))
        self._compile = _guarded("compile", backend.compile)

    def compile(self, *args: Any, **kwargs: Any) -> GuardedStep:
        """Makes a step ready for a bucket.

        Raises:
          ContractViolation: what the backend returned is no `CompiledStep`.
        """
        step: object = self._compile(*args, **kwargs)
        # On the type first: reading a property of a step that is still compiling would wait.
        missing = [n for n in _STEP_MEMBERS if not hasattr(type(step), n) and not hasattr(step, n)]
        if missing:
            subject = f"what compile returned ({type(step).__name__})"
            raise ContractViolation(subject, [f"it has no {name!r}" for name in missing])
        return GuardedStep(cast(CompiledStep, step), self.ops)


def guard(backend: Backend) -> Backend:
    """Wraps a backend."""
    return cast(Backend, GuardedBackend(backend))


def _blame(error: Exception, ops: Mapping[str, Any]) -> str:
    """Names the op that raised, when one is on the traceback; else the step itself."""
    codes = {code: name for name, op in ops.items() if (code := _code(op)) is not None}
    blamed = "CompiledStep.run"
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        blamed = codes.get(trace.tb_frame.f_code, blamed)
        trace = trace.tb_next
    return blamed


def _code(op: Any) -> CodeType | None:
    while hasattr(op, "func"):  # functools.partial
        op = op.func
    op = getattr(op, "__func__", op)
    code = getattr(op, "__code__", None)
    return code if isinstance(code, CodeType) else None


__all__ = ["GuardedBackend", "GuardedStep", "guard"]
