"""The start-up ledger: where the time between the command and the first request goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from leadframe.metrics.instruments import PREFIX

PhaseName = Literal["import", "load", "profile", "compile", "capture", "kv"]
PHASES: Final[tuple[PhaseName, ...]] = ("import", "load", "profile", "compile", "capture", "kv")


@dataclass(frozen=True, slots=True)
class Detail:
    """One part of a phase, such as the compilation for one bucket.

    Attributes:
      label: what it is.
      seconds: how long it took.
      bytes: memory that it holds.
      cache_hit: whether a cache on disk served it; None when there is no cache.
    """

    label: str
    seconds: float = 0.0
    bytes: int = 0
    cache_hit: bool | None = None


@dataclass(slots=True)
class Phase:
    """One phase of start-up; entering it again adds to it.

    Attributes:
      seconds: wall time.
      bytes: bytes that were read or allocated.
      details: its parts.
      note: one line for the table, such as a cache path.
    """

    name: PhaseName
    seconds: float = 0.0
    bytes: int = 0
    details: list[Detail] = field(default_factory=list)
    note: str = ""

    def detail(
        self, label: str, seconds: float = 0.0, bytes: int = 0, cache_hit: bool | None = None
    ) -> None:
        """Adds a part. Its seconds and bytes are not added to the phase's own."""
        self.details.append(Detail(label, seconds, bytes, cache_hit))

    def remarks(self) -> str:
        """Returns what the table shows after the figures."""
        parts = []
        if self.name == "load" and self.bytes and self.seconds > 0:
            parts.append(f"{self.bytes / self.seconds / 1e6:,.0f} MB/s")
        if self.details:
            unit = "buckets" if self.name in ("compile", "capture") else "parts"
            parts.append(f"{len(self.details)} {unit}")
        hits = [d.cache_hit for d in self.details if d.cache_hit is not None]
        if hits:
            parts.append(f"cache: {sum(hits)} hit, {len(hits) - sum(hits)} missed")
        return "; ".join([*parts, self.note] if self.note else parts)


class StartupLedger:
    """Times each phase of start-up separately; a table, JSON and gauges come out.

    One thread writes; any thread may read.
    """

    def __init__(self) -> None:
        self._phases: dict[PhaseName, Phase] = {name: Phase(name) for name in PHASES}

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[Phase]:
        """Adds the time that the block takes to a phase, also when it raises.

        Yields:
          the phase, whose `bytes`, `note` and details the block may set.
        """
        entry, start = self._phases[name], time.perf_counter()
        try:
            yield entry
        finally:
            entry.seconds += time.perf_counter() - start

    def record(
        self,
        name: PhaseName,
        seconds: float,
        *,
        bytes: int = 0,
        label: str = "",
        cache_hit: bool | None = None,
    ) -> None:
        """Adds time and bytes measured elsewhere; with a label, as a detail too."""
        entry = self._phases[name]
        entry.seconds += seconds
        entry.bytes += bytes
        if label:
            entry.detail(label, seconds, bytes, cache_hit)

    def __getitem__(self, name: PhaseName) -> Phase:
        return self._phases[name]

    @property
    def total_seconds(self) -> float:
        """The sum over all phases."""
        return sum(entry.seconds for entry in self._phases.values())

    def table(self) -> str:
        """Returns the ledger as text, one phase a line."""
        lines = [f"{'start-up':<10}{'seconds':>9}{'memory':>12}  notes"]
        for entry in self._phases.values():
            size = format_bytes(entry.bytes) if entry.bytes else "-"
            line = f"{entry.name:<10}{entry.seconds:>9.2f}{size:>12}  {entry.remarks()}"
            lines.append(line.rstrip())
        lines.append(f"{'total':<10}{self.total_seconds:>9.2f}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Returns the ledger as plain data with stable keys."""
        phases = [asdict(entry) for entry in self._phases.values()]
        return {"total_seconds": self.total_seconds, "phases": phases}

    def families(self, labels: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
        """Yields what Prometheus reads: gauges with a `phase` or `result` label besides."""

        def gauge(name: str, help: str, label: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(PREFIX + name, help, labels=[*labels, label])

        seconds = gauge("startup_seconds", "Time of a phase of start-up.", "phase")
        size = gauge("startup_bytes", "Bytes read or allocated in a phase.", "phase")
        caches = gauge("startup_compile_cache", "Buckets compiled, by cache.", "result")
        for entry in self._phases.values():
            seconds.add_metric([*values, entry.name], entry.seconds)
            size.add_metric([*values, entry.name], entry.bytes)
        hits = [d.cache_hit for d in self._phases["compile"].details]
        for result, value in (("hit", True), ("miss", False), ("none", None)):
            caches.add_metric([*values, result], hits.count(value))
        yield from (seconds, size, caches)


def format_bytes(size: int) -> str:
    """Returns a size as people read it, in binary units: "1.23 GiB"."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} {units[-1]}"
