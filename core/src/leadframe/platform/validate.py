"""Checks what plugins hand over. Each check lists every problem, not only the first."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from leadframe.errors import ContractViolation
from leadframe.platform.backend import MEMBERS, Backend
from leadframe.platform.capabilities import Capabilities, OpSpec
from leadframe.platform.info import KernelImpl, PlatformInfo
from leadframe.platform.names import did_you_mean
from leadframe.platform.namespace import PRIMITIVES
from leadframe.platform.ops import OP_NAMES, REQUIRED_OPS, Ops
from leadframe.platform.version import CONTRACT

_DATA_MEMBERS = ("caps", "xp", "ops")
_KINDS = ("accelerator", "host", "test")
_GRAPHS = get_args(inspect.get_annotations(Capabilities, eval_str=True)["graph"])
_SIMULATED = get_args(inspect.get_annotations(Capabilities, eval_str=True)["simulated"])


def check_info(info: PlatformInfo, name: str | None, distribution: str) -> list[str]:
    """Lists the problems of a `PlatformInfo`.

    Args:
      info: what `platform_info` returned.
      name: the entry point's name, which the platform must carry; None leaves it free.
      distribution: the distribution that the entry point belongs to.
    """
    problems = []
    if name is not None and info.name != name:
        problems.append(f"platform_info names {info.name!r}; its entry point is {name!r}")
    for field in ("contract", "min_contract"):
        if not _is_version(getattr(info, field)):
            value = getattr(info, field)
            problems.append(f"{field} is {value!r}; it must be (major, minor), such as {CONTRACT}")
    if not problems and info.min_contract > info.contract:
        problems.append(f"min_contract {info.min_contract} is above contract {info.contract}")
    if _normal(str(info.distribution)) != _normal(distribution):
        problems.append(f"distribution is {info.distribution!r}; pip knows it as {distribution!r}")
    if info.kind not in _KINDS:
        problems.append(f"kind is {info.kind!r}; it must be one of {', '.join(_KINDS)}")
    if not isinstance(info.summary, str) or "\n" in info.summary:
        problems.append(f"summary is {info.summary!r}; it must be one line")
    return problems


def _is_version(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(type(part) is int and part >= 0 for part in value)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def validate_backend(
    backend: object, subject: str, contract: tuple[int, int] = CONTRACT
) -> Backend:
    """Checks a backend against the protocol.

    Args:
      backend: what `platform_create` returned.
      subject: the plugin, for the message.
      contract: the version that the plugin was written for; names from a newer minor version
        than the core's are left alone.

    Raises:
      ContractViolation: lists every problem.
    """
    problems = list(_missing_members(backend))
    if len(problems) == len(MEMBERS):
        found = f"platform_create returned {type(backend).__name__}, which is no backend"
        raise ContractViolation(subject, [found])
    present = [name for name in MEMBERS if hasattr(backend, name)]
    problems += [p for name in present for p in _member_problems(backend, name)]
    if "caps" in present:
        problems += caps_problems(getattr(backend, "caps", None))
    if "xp" in present:
        xp = getattr(backend, "xp", None)
        problems += [f"xp lacks {name!r}" for name in PRIMITIVES if not hasattr(xp, name)]
    if "ops" in present:
        problems += _ops_problems(getattr(backend, "ops", None), contract <= CONTRACT)
    if problems:
        raise ContractViolation(subject, problems)
    return backend  # type: ignore[return-value]


def _missing_members(backend: object) -> Iterator[str]:
    names: list[str] = dir(backend)
    public = [name for name in names if not name.startswith("_")]
    for name in MEMBERS:
        if not hasattr(backend, name):
            others = [other for other in public if other not in MEMBERS]
            yield f"member {name!r} is missing{did_you_mean(name, others)}"


def _member_problems(backend: object, name: str) -> Iterator[str]:
    if name in _DATA_MEMBERS:
        return
    member = getattr(backend, name)
    if not callable(member):
        yield f"member {name!r} is {type(member).__name__}, not a method"
        return
    yield from signature_problems(f"member {name!r}", member, getattr(Backend, name))


def signature_problems(what: str, given: Any, wanted: Callable[..., Any]) -> Iterator[str]:
    """Yields a problem when `given` cannot be called as the contract calls `wanted`.

    Parameters without a default are passed by position, the others by name.
    """
    try:
        signature = inspect.signature(given)
    except (ValueError, TypeError):  # a builtin that does not tell
        return
    parameters = [p for p in inspect.signature(wanted).parameters.values() if p.name != "self"]
    positional = [p.name for p in parameters if p.default is p.empty]
    named = {p.name: None for p in parameters if p.default is not p.empty}
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        text = ", ".join([*positional, *(f"{name}=…" for name in named)])
        yield f"{what} is called as ({text}) and takes {signature}: {error}"


def _ops_problems(ops: object, is_known: bool) -> Iterator[str]:
    if not isinstance(ops, Mapping):
        yield f"ops is {type(ops).__name__}, not a mapping of names to functions"
        return
    for name in REQUIRED_OPS:
        if name not in ops:
            others = [str(other) for other in ops if other not in OP_NAMES]
            yield f"the required op {name!r} is missing{did_you_mean(name, others)}"
    for name, function in ops.items():
        if name not in OP_NAMES:
            if is_known:
                yield f"there is no op {name!r}{did_you_mean(str(name), OP_NAMES)}"
        elif not callable(function):
            yield f"op {name!r} is {type(function).__name__}, not a function"
        else:
            yield from signature_problems(f"op {name!r}", function, getattr(Ops, name))


def kernel_problems(kernel: KernelImpl) -> Iterator[str]:
    """Yields the problems of a kernel that a plugin offers."""
    what = f"kernel {kernel.name!r}"
    if kernel.op not in OP_NAMES:
        hint = did_you_mean(kernel.op, OP_NAMES)
        yield f"{what} is for op {kernel.op!r}, which does not exist{hint}"
    else:
        yield from signature_problems(what, kernel.fn, getattr(Ops, kernel.op))


def caps_problems(caps: object) -> Iterator[str]:
    """Yields the problems of a `Capabilities`."""
    if not isinstance(caps, Capabilities):
        yield f"caps is {type(caps).__name__}, not Capabilities"
        return
    yield from _list_problems(caps)
    yield from _choice_problems(caps)
    yield from _why_not_problems(caps)


def _list_problems(caps: Capabilities) -> Iterator[str]:
    for name in ("compute_dtypes", "kv_dtypes"):
        value = getattr(caps, name)
        if not isinstance(value, tuple) or not value or not all(isinstance(v, str) for v in value):
            yield f"caps.{name} is {value!r}; it must be a tuple of at least one dtype name"
    if not _is_counts(caps.block_sizes):
        yield f"caps.block_sizes is {caps.block_sizes!r}; it must be a tuple of positive integers"
    if caps.head_dims is not None and not _is_counts(caps.head_dims):
        yield f"caps.head_dims is {caps.head_dims!r}; it must be None or positive integers"
    features: object = caps.attention_features
    if not isinstance(features, frozenset):
        yield f"caps.attention_features is {features!r}; it must be a frozenset of names"


def _choice_problems(caps: Capabilities) -> Iterator[str]:
    if caps.graph not in _GRAPHS:
        hint = did_you_mean(str(caps.graph), _GRAPHS)
        yield f"caps.graph is {caps.graph!r}; it must be one of {', '.join(_GRAPHS)}{hint}"
    if caps.simulated not in _SIMULATED:
        yield f"caps.simulated is {caps.simulated!r}; it must be one of {_SIMULATED}"
    if caps.tensor_parallel < 1 or (caps.max_graphs is not None and caps.max_graphs < 1):
        yield "caps.tensor_parallel and caps.max_graphs must be at least 1"
    if not caps.family:
        yield "caps.family is empty; it must name the array library"


def _is_counts(value: object) -> bool:
    if not isinstance(value, tuple) or not value:
        return False
    return all(type(item) is int and item > 0 for item in value)


def _why_not_problems(caps: Capabilities) -> Iterator[str]:
    """Asks about a feature that no contract has: the answer must be a refusal, not a crash."""
    spec = OpSpec("attention", features=frozenset({"a feature of the future"}))
    try:
        answer: object = caps.why_not(spec)
    except Exception as error:
        yield f"caps.why_not raised {type(error).__name__}: {error}"
        return
    if answer is not None and not isinstance(answer, str):
        yield f"caps.why_not returned {answer!r}; it must be a reason or None"


__all__ = [
    "caps_problems",
    "check_info",
    "kernel_problems",
    "signature_problems",
    "validate_backend",
]
