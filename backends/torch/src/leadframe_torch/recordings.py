"""Recordings: a function captured as a graph, and the buffers that it reads its batch from.

A forward pass does not depend on how its tokens are sampled, so that steps share its recording.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from leadframe.platform.backend import KV, StepFunction
from leadframe.platform.batch import Bucket, StepArrays, packed_sizes, unpack
from leadframe_torch.graphs import Graph, GraphFactory

Outputs = dict[str, Any]


class Recording:
    """One recorded function.

    Attributes:
      outputs: what a replay fills.
      bytes: device memory of the graph and of its inputs.
      seconds: how long capturing took.
    """

    def __init__(
        self,
        function: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Any],
        kv: KV,
        device: torch.device,
        graphs: GraphFactory,
    ) -> None:
        start = time.perf_counter()
        self._function, self._weights, self._kv = function, weights, list(kv)
        num_ints, num_floats = packed_sizes(bucket)
        self._ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self._floats = torch.zeros(num_floats, dtype=torch.float32, device=device)
        # zeros are a batch of padding: recording writes to the null block alone
        arrays, baked = unpack(bucket, self._ints, self._floats), list(kv)

        def call() -> tuple[Outputs, KV]:
            return function(weights, baked, arrays)

        self._graph: Graph
        with torch.inference_mode():
            self._graph, (self.outputs, _) = graphs.record(call)
        self.bytes = self._graph.bytes + 4 * (num_ints + num_floats)
        self.seconds = time.perf_counter() - start
        self.num_users = 0

    def serves(self, function: StepFunction, weights: Mapping[str, Any], kv: KV) -> bool:
        """Whether it recorded this very function on these very arrays."""
        return function == self._function and weights is self._weights and self.reads(kv)

    def reads(self, kv: KV) -> bool:
        """Whether its addresses are those of a KV cache."""
        return len(kv) == len(self._kv) and all(a is b for a, b in zip(kv, self._kv, strict=True))

    def fill(self, ints: Tensor, floats: Tensor) -> None:
        """Copies in the leading part of a packed batch, which is what the function reads."""
        self._ints.copy_(ints[: len(self._ints)])
        self._floats.copy_(floats[: len(self._floats)])

    def replay(self) -> None:
        """Runs the function again on what was filled in."""
        self._graph.replay()

    def release(self) -> None:
        """Frees the graph when its last user has gone."""
        self.num_users -= 1
        if not self.num_users:
            self._graph.close()
            self.outputs = {}


class Recordings:
    """The live recordings of a backend.

    Attributes:
      latest: the arrays of the step that ran last, whichever it was. Steps keep none themselves:
        there are hundreds, and a token mask alone may take megabytes.

    Args:
      device: where the buffers are.
      graphs: what records.
    """

    def __init__(self, device: torch.device, graphs: GraphFactory) -> None:
        self._device, self._graphs = device, graphs
        self.latest: StepArrays | None = None
        self._live: WeakValueDictionary[Bucket, Recording] = WeakValueDictionary()

    def share(
        self, function: StepFunction, bucket: Bucket, weights: Mapping[str, Any], kv: KV
    ) -> Recording:
        """Returns a recording that its user must release: a known one, or a new one."""
        known = self._live.get(bucket)
        if known is None or not known.num_users or not known.serves(function, weights, kv):
            known = Recording(function, bucket, weights, kv, self._device, self._graphs)
            self._live[bucket] = known
        known.num_users += 1
        return known
