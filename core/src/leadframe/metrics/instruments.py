"""Plain counters, gauges and histograms that cost well under a microsecond to update.

`prometheus_client` renders them; its own instruments take a lock and scan all buckets at each
observation, which at 256 running requests would cost more than scheduling the step.
They are not synchronised: `EngineMetrics` holds one lock around each event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

PREFIX = "leadframe_"


class Gauge:
    """A value that goes up and down."""

    __slots__ = ("help", "name", "value")

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help, self.value = PREFIX + name, help, 0.0

    def family(self, labels: Sequence[str], values: Sequence[str]) -> Metric:
        """Returns what Prometheus reads."""
        family = GaugeMetricFamily(self.name, self.help, labels=labels)
        family.add_metric(values, self.value)
        return family


class Counter:
    """A value that only grows."""

    __slots__ = ("help", "name", "value")

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help, self.value = PREFIX + name, help, 0

    def raise_to(self, total: int) -> None:
        """Takes a total that is counted elsewhere; a smaller one is ignored."""
        self.value = max(self.value, total)

    def family(self, labels: Sequence[str], values: Sequence[str]) -> Metric:
        """Returns what Prometheus reads; the exposition appends `_total` to the name."""
        family = CounterMetricFamily(self.name, self.help, labels=labels)
        family.add_metric(values, self.value)
        return family


class LabelledCounter:
    """Counters that differ in the value of one label; every known value shows from the start."""

    __slots__ = ("counts", "help", "label", "name")

    def __init__(self, name: str, help: str, label: str, known: Sequence[str]) -> None:
        self.name, self.help, self.label = PREFIX + name, help, label
        self.counts = dict.fromkeys(known, 0)

    def add(self, value: str) -> None:
        """Counts one for a label value, which must be from a bounded set."""
        self.counts[value] = self.counts.get(value, 0) + 1

    def family(self, labels: Sequence[str], values: Sequence[str]) -> Metric:
        """Returns what Prometheus reads."""
        family = CounterMetricFamily(self.name, self.help, labels=[*labels, self.label])
        for value, count in self.counts.items():
            family.add_metric([*values, value], count)
        return family


class Histogram:
    """Observations counted into buckets with fixed upper bounds."""

    __slots__ = ("bounds", "counts", "help", "name", "sum")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = PREFIX + name, help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `times` equal observations."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, labels: Sequence[str], values: Sequence[str]) -> Metric:
        """Returns what Prometheus reads: cumulative buckets and the sum."""
        family = HistogramMetricFamily(self.name, self.help, labels=labels)
        buckets, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric(values, buckets, self.sum)
        return family


Instrument = Gauge | Counter | LabelledCounter | Histogram
