"""Group J: contract evolution. Old and new plugins load as specified, and this one will too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from leadframe.conformance.case import Case
from leadframe.conformance.kit import Kit
from leadframe.errors import IncompatibleContract
from leadframe.platform import CONTRACT, PlatformInfo
from leadframe.platform.negotiation import check_contract

_STUB = PlatformInfo("stub", "a stub", (1, 0), (1, 0), "stub-distribution", "0", "test")
_MAJOR, _MINOR = CONTRACT


def _info(kit: Kit) -> PlatformInfo:
    return kit.plugin.info() if kit.plugin is not None else _STUB


def _own(kit: Kit) -> None:
    """The plugin loads on this core and on later minor versions of it."""
    info = _info(kit)
    for minor in (_MINOR, _MINOR + 1, _MINOR + 40):
        check_contract(info, (_MAJOR, minor))
    kit.metrics["contract"] = list(info.contract)


def _next_major(kit: Kit) -> None:
    """The next major version refuses it, and says what to upgrade."""
    info = _info(kit)
    error = kit.raises(
        IncompatibleContract, "the next major", lambda: check_contract(info, (_MAJOR + 1, 0))
    )
    text = f"pip install --upgrade {info.distribution}"
    kit.check(text in str(error), f"the error does not say {text!r}: {error}")


def _stubs(kit: Kit) -> None:
    """Contracts around this one."""
    fine = [((_MAJOR, 0), (_MAJOR, 0)), ((_MAJOR, _MINOR + 7), (_MAJOR, _MINOR))]
    for contract, oldest in fine:
        check_contract(replace(_STUB, contract=contract, min_contract=oldest))
    bad = [
        ((_MAJOR - 1, 9), (_MAJOR - 1, 0)),
        ((_MAJOR + 1, 0), (_MAJOR + 1, 0)),
        ((_MAJOR, _MINOR + 2), (_MAJOR, _MINOR + 1)),
    ]
    for contract, oldest in bad:
        stub = replace(_STUB, contract=contract, min_contract=oldest)
        kit.raises(IncompatibleContract, f"contract {contract}", partial(check_contract, stub))


CASES = [
    Case("J.contract[own]", _own),
    Case("J.contract[next-major]", _next_major),
    Case("J.contract[stubs]", _stubs),
]
