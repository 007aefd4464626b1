"""Counters, histograms and the start-up ledger. Knows requests; knows no engine and no HTTP."""

from __future__ import annotations

from leadframe.metrics.engine_metrics import EngineMetrics
from leadframe.metrics.ledger import PHASES, Phase, StartupLedger

__all__ = ["PHASES", "EngineMetrics", "Phase", "StartupLedger"]
