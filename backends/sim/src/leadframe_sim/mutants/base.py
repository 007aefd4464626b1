"""What a mutant is, and the bases that they are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from leadframe.platform import Backend, Capabilities
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe_sim.backend import SimBackend
from leadframe_sim.device import SimDevice

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deliberate fault.

    Attributes:
      name: short and unique.
      group: the group of the kit that must catch it.
      summary: the fault, for the table in the documentation.
      make: creates the broken backend; None for faults of a plugin.
      plugin: MODULE:ATTRIBUTE of the broken plugin, for faults of loading.
      tier: the smallest tier that must catch it.
    """

    name: str
    group: str
    summary: str
    make: Callable[[], Backend] | None = None
    plugin: str = ""
    tier: Literal["core", "full"] = "core"


class OpMutant(ReferenceBackend):
    """The NumPy backend with some ops wrapped and some capabilities changed."""

    def __init__(self, wrap: Mapping[str, Callable[[Op], Op]], **caps: Any) -> None:
        super().__init__()
        self._mutated: Capabilities = replace(super().caps, **caps)
        broken = {name: wrapper(self._ops[name]) for name, wrapper in wrap.items()}
        self._ops = {**self._ops, **broken}

    @property
    def caps(self) -> Capabilities:
        """The changed capabilities."""
        return self._mutated


def op_mutant(
    name: str,
    summary: str,
    op: str,
    wrap: Callable[[Op], Op],
    tier: Literal["core", "full"] = "core",
) -> Mutant:
    """A mutant with one broken op."""
    return Mutant(name, "B", summary, lambda: OpMutant({op: wrap}), tier=tier)


def sim_backend(kind: type[SimBackend] = SimBackend, graph: Any = "record") -> SimBackend:
    """A simulated backend of a broken class."""
    return kind(SimDevice(total=1 << 30), graph)


__all__ = ["Mutant", "Op", "OpMutant", "op_mutant", "sim_backend"]
