"""Tensor parallelism over processes: the ranks beside the one that the engine drives.

Rank 0 is the engine's own backend. For every other rank the core starts a process that builds a
backend, reads its slices of the weights and builds the same step; it then does what rank 0 does,
told through a socket that speaks JSON and raw bytes. What the model exchanges inside a step goes
through the backends' own collectives. Engine, scheduler and runner see one `Backend`.
"""

from __future__ import annotations

from leadframe.engine.ranks.backend import RankedBackend
from leadframe.engine.ranks.start import rendezvous_path, start_ranks

__all__ = ["RankedBackend", "rendezvous_path", "start_ranks"]
