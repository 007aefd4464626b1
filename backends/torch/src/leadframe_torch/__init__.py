"""What every Leadframe backend on torch arrays shares.

A torch device becomes a backend with a `DeviceLayer` (its memory and its graphs), `Capabilities`,
and `TorchBackend`, which brings every op. See `TorchBackend` for what to override.
"""

from __future__ import annotations

from leadframe_torch.attention_plan import AttentionPlan
from leadframe_torch.backend import ATTENTION_FEATURES, CompileMode, TorchBackend
from leadframe_torch.devices import AcceleratorLayer, DeviceLayer, Holdings
from leadframe_torch.graphs import Graph, GraphFactory, ModuleGraphs
from leadframe_torch.host import HostLayer
from leadframe_torch.weights import Rank

__all__ = [
    "ATTENTION_FEATURES",
    "AcceleratorLayer",
    "AttentionPlan",
    "CompileMode",
    "DeviceLayer",
    "Graph",
    "GraphFactory",
    "Holdings",
    "HostLayer",
    "ModuleGraphs",
    "Rank",
    "TorchBackend",
]
