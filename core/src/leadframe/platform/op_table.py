"""Which implementation serves each op of one model: decided once at load, then plain attributes.

Order of preference: what the user asked for, then kernels offered above the backend's own op,
the backend's op, kernels offered below it, the reference over `Backend.xp` on the device, and,
only when asked for, the reference on the host. Nothing falls back after that: an op that raises
while it runs fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from leadframe.errors import ConfigError, Unsupported
from leadframe.platform.backend import Backend
from leadframe.platform.capabilities import OpSpec
from leadframe.platform.host_ops import host_op
from leadframe.platform.info import KernelImpl
from leadframe.platform.names import did_you_mean
from leadframe.platform.ops import OP_NAMES, REQUIRED_OPS
from leadframe.platform.reference_ops import reference_ops

OpFunction = Callable[..., Any]
WhyNot = Callable[[OpSpec], str | None]

_WEIGHT_OPS = frozenset({"embed", "linear"})
"""Ops whose weights a backend may store in a form of its own."""
_HOST_OPS = frozenset(OP_NAMES) - {*REQUIRED_OPS, "plan", "all_reduce", "all_gather"}


@dataclass(frozen=True, slots=True)
class OpChoice:
    """How one op was resolved.

    Attributes:
      op: the op.
      implementation: the name of what serves it.
      passed_over: (name, reason) of every implementation that came before it.
    """

    op: str
    implementation: str
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    fn: OpFunction
    why_not: WhyNot


class OpTable:
    """One attribute per op, bound once; satisfies `leadframe.platform.ops.Ops`.

    Attributes:
      choices: how each op was resolved, in the order of the contract.
    """

    def __init__(self, functions: Mapping[str, OpFunction], choices: Sequence[OpChoice]) -> None:
        self.choices = tuple(choices)
        for name, function in functions.items():
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        hint = did_you_mean(name, OP_NAMES)
        raise AttributeError(f"the op table has no op {name!r}{hint}")

    def report(self) -> str:
        """Returns a table for people: op, implementation, and why others were passed over."""
        width = max(len(choice.op) for choice in self.choices)
        lines = []
        for choice in self.choices:
            reasons = "; ".join(f"not {name}: {why}" for name, why in choice.passed_over)
            line = f"{choice.op:<{width}}  {choice.implementation}"
            lines.append(f"{line}  ({reasons})" if reasons else line)
        return "\n".join(lines)

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the same as plain data."""
        return [asdict(choice) for choice in self.choices]


def build_op_table(
    backend: Backend,
    requirements: Iterable[OpSpec] = (),
    kernels: Sequence[KernelImpl] = (),
    order: Mapping[str, Sequence[str]] | None = None,
    fallback: Literal["device", "host"] = "device",
    *,
    platform: str = "backend",
) -> OpTable:
    """Resolves every op for one model.

    Args:
      backend: the backend that runs the model.
      requirements: what the model will ask; several specs may name one op, and an
        implementation must serve all of them.
      kernels: what plugins offer for this platform.
      order: op → implementation names that the user prefers, best first. Nothing outside the
        list is used for that op.
      fallback: "host" allows references on the host for ops that nothing else serves.
      platform: what the backend's own ops are called in `order` and in the report.

    Raises:
      Unsupported: nothing serves an op; the reasons are in the message.
      ConfigError: `order` names an op or an implementation that does not exist.
    """
    order = dict(order or {})
    _check_names("--op", order, OP_NAMES, "op")
    specs: dict[str, list[OpSpec]] = {}
    for spec in requirements:
        specs.setdefault(spec.op, []).append(spec)
    references = reference_ops(backend.xp)
    functions, choices = {}, []
    for op in OP_NAMES:
        candidates = list(_candidates(op, backend, kernels, references, fallback, platform))
        wanted = specs.get(op) or [_default_spec(op, backend)]
        chosen, passed_over = _choose(op, _ordered(op, candidates, order.get(op)), wanted)
        functions[op] = chosen.fn
        choices.append(OpChoice(op, chosen.name, passed_over))
    return OpTable(functions, choices)


def _default_spec(op: str, backend: Backend) -> OpSpec:
    """What an op is asked when the model says nothing about it."""
    return OpSpec(op=op, dtype=backend.caps.compute_dtypes[0])


def _candidates(
    op: str,
    backend: Backend,
    kernels: Sequence[KernelImpl],
    references: Mapping[str, OpFunction],
    fallback: str,
    platform: str,
) -> Iterator[_Candidate]:
    """Every implementation of an op, best first."""
    offered = sorted((k for k in kernels if k.op == op), key=lambda k: -k.priority)
    for kernel in offered:
        if kernel.priority > 0:
            yield _Candidate(kernel.name, kernel.fn, kernel.why_not)
    if op in backend.ops:
        yield _Candidate(platform, backend.ops[op], backend.caps.why_not)
    for kernel in offered:
        if kernel.priority <= 0:
            yield _Candidate(kernel.name, kernel.fn, kernel.why_not)
    if op not in REQUIRED_OPS:
        yield _Candidate("reference", references[op], _objection(op, backend))
    if fallback == "host" and op in _HOST_OPS:
        yield _Candidate("host", host_op(op, backend), _objection(op, backend))


def _objection(op: str, backend: Backend) -> WhyNot:
    """A definition reads plain arrays: not what the backend's own op may have packed."""
    if op in _WEIGHT_OPS and op in backend.ops and not backend.caps.plain_weights:
        return _packed
    return _anything


def _packed(spec: OpSpec) -> str | None:
    return (
        f"weights may be packed for the device's own {spec.op} (its capabilities do not say "
        "plain_weights)"
    )


def _anything(spec: OpSpec) -> str | None:
    return None


def _ordered(
    op: str, candidates: Sequence[_Candidate], names: Sequence[str] | None
) -> Sequence[_Candidate]:
    """Puts the user's choice into effect: exactly the named ones, in that order."""
    if names is None:
        return candidates
    by_name = {candidate.name: candidate for candidate in reversed(candidates)}
    _check_names(f"--op {op}", names, tuple(by_name), "implementation")
    return [by_name[name] for name in names]


def _choose(
    op: str, candidates: Sequence[_Candidate], specs: Sequence[OpSpec]
) -> tuple[_Candidate, tuple[tuple[str, str], ...]]:
    """Takes the first candidate that has no objection to any spec."""
    passed_over: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = next((why for spec in specs if (why := candidate.why_not(spec))), None)
        if reason is None:
            return candidate, tuple(passed_over)
        passed_over.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in passed_over)
    raise Unsupported(op, specs[0], reasons or "nothing implements it")


def _check_names(flag: str, given: Iterable[str], known: Sequence[str], noun: str) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{flag} names {noun} {name!r}, which does not exist{hint}")


__all__ = ["OpChoice", "OpTable", "build_op_table"]
