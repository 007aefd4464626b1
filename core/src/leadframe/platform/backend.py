"""The `Backend` protocol: thirteen members that make a device serve language models.

Arrays are opaque to the core: it passes them from one member to another and never looks inside.
Ops are functional. An argument whose name ends in `_d` is donated: the backend may reuse its
memory for the result, and the caller must not touch it afterwards. A backend that mutates in
place returns the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from leadframe.platform.batch import Bucket, StepArrays, StepBatch
from leadframe.platform.capabilities import Capabilities
from leadframe.platform.info import MemoryInfo

Array = Any
"""A device array of whatever type the backend uses."""

KVLayer = Any
"""One layer's KV cache: an opaque handle whose physical layout is private to the backend."""

KV = list[KVLayer]
"""The KV cache: one handle a layer."""

WeightRole = Literal["linear", "embed", "tensor"]
"""How a weight will be used: by `linear` only, by `embed` only, or anyhow."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How tensor parallelism splits a weight. Names and shapes are Hugging Face's.

    Attributes:
      axis: the axis that is cut: 0 splits the outputs of a [out, in] matrix (column parallel),
        1 its inputs (row parallel); None replicates.
      heads: attention heads along that axis; cuts fall between heads. When there are fewer
        heads than ranks, heads are repeated. None cuts evenly.
      unit: elements a head along that axis.
    """

    axis: int | None = None
    heads: int | None = None
    unit: int = 1


class WeightSource(Protocol):
    """A weight that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""

    @property
    def dtype(self) -> str:
        """The dtype that `read` returns, such as "float32" or "bfloat16" (ml_dtypes)."""

    def read(self, index: tuple[slice, ...] | None = None) -> npt.NDArray[Any]:
        """Reads a slice of the weight, or all of it, touching only the bytes it needs."""


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """A quantised matrix as it is stored: weight = value * scale + offset, in float32.

    Value times scale is exact in float32, so fusing it with the addition changes nothing.

    Attributes:
      values: int8 [rows, columns]; 0 to 15 when `bits` is 4.
      scale: float16 or float32 [rows, columns / block], one for every block of columns.
      offset: the same, or None for 0.
      bits: 4 or 8.
    """

    values: npt.NDArray[np.int8]
    scale: npt.NDArray[Any]
    offset: npt.NDArray[Any] | None
    bits: Literal[4, 8]


@runtime_checkable
class BlockWeightSource(WeightSource, Protocol):
    """A weight source that can also tell its quantised form; a backend may use it or `read`."""

    def read_blocks(self, index: tuple[slice, ...] | None = None) -> WeightBlocks | None:
        """Reads a slice in quantised form; None when its kind has none that fits."""


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """The KV cache of one layer.

    Attributes:
      num_kv_heads: KV heads of the whole model; a backend with tensor parallelism divides.
      head_dim: elements a head.
    """

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of a model.

    Attributes:
      layers: one entry a layer.
      block_size: tokens a block.
      dtype: element type.
    """

    layers: tuple[KVLayerSpec, ...]
    block_size: int
    dtype: str = "float32"


StepFunction = Callable[[Mapping[str, Array], KV, StepArrays], tuple[dict[str, Array], KV]]
"""`step(weights, kv_d, arrays) -> (outputs, kv)`: pure, built by the core over the op table."""


@runtime_checkable
class SplitStep(Protocol):
    """A step that says where its layers end. Every step that the core builds is one.

    To call it is `forward` and then `head`. A backend may record or compile `forward` alone, once
    for `forward_bucket(bucket)`, and run `head` as it is: some tens of small ops. Then buckets that
    differ only in how they sample share what was made, and a way of sampling that was never met
    before costs nothing. Where shapes are static, `head` is compiled too, once for
    `head_bucket(bucket)`. A backend that has no use for it calls the step.
    """

    def __call__(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Array], KV]:
        """Runs the whole step; a `StepFunction`."""

    def forward(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Array], KV]:
        """Runs the layers; reads only the arrays that `forward_bucket` has. A `StepFunction`.

        What it returns has tokens on the first axis.
        """

    def head(
        self, weights: Mapping[str, Array], hidden: Mapping[str, Array], arrays: StepArrays
    ) -> dict[str, Array]:
        """Turns what `forward` returned into the outputs of the step.

        Of the sizes and arrays it reads only those that `head_arrays` has, and of `hidden` only
        the rows `logits_idx`: it may be given these rows, with `logits_idx` counting them.
        """


@runtime_checkable
class CompiledStep(Protocol):
    """A step that is ready to run for one bucket.

    Attributes:
      bytes: device memory that this step holds beyond weights and KV.
      compile_seconds: time spent compiling.
      capture_seconds: time spent capturing a graph.
      cache_hit: whether a cache on disk served the compilation; None when there is no cache, or
        all was compiled for other steps.
    """

    bytes: int
    compile_seconds: float
    capture_seconds: float
    cache_hit: bool | None

    def run(self, batch: StepBatch, kv_d: KV) -> tuple[dict[str, Array], KV]:
        """Uploads the batch, runs the step, returns its outputs and the new KV.

        The outputs stay valid until the next `run` of any step of this backend. The call may
        return before the device is done; `download` waits.

        Raises:
          DeviceOOM: not enough memory; the KV is unchanged.
          DeviceLost: the device is gone.
        """

    def close(self) -> None:
        """Frees what the step holds."""


@runtime_checkable
class Backend(Protocol):
    """What a plugin creates for a device. Thirteen members, no more.

    One thread calls a backend. Two backends may live in one process. Every member may raise
    the errors of `leadframe.errors.PlatformError`; anything else is reported as a bug of the
    backend.
    """

    @property
    def caps(self) -> Capabilities:
        """Static facts; the same object every time."""

    @property
    def xp(self) -> Any:
        """The array namespace (array API standard) plus `put` and `top_k`.

        `xp.put(buf, rows, cols, values)` returns buf with buf[rows[i], cols[i]] = values[i];
        `xp.top_k(x, k)` returns (values, int32 indices) of the k largest of the last axis,
        largest first. Reference ops run over it.
        """

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """The ops that this backend implements itself, by name; see `leadframe.platform.ops`."""

    def memory(self) -> MemoryInfo:
        """Reads the device's memory, in bytes."""

    def upload(
        self,
        source: npt.NDArray[Any] | WeightSource,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Array:
        """Copies a host array or a weight to the device.

        Args:
          source: a NumPy array, or a weight of which only this rank's slice is read.
          dtype: element type on the device; None keeps the source's.
          partition: how ranks share it; None replicates.
          role: "linear" allows a packed form that only `linear` reads.

        Raises:
          DeviceOOM: it does not fit.
        """

    def download(self, array: Array) -> npt.NDArray[Any]:
        """Copies a device array to the host, waiting for the work that produces it.

        bfloat16 arrives as float32.
        """

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Returns the device bytes that one block costs over all layers, padding included."""

    def kv_alloc(self, spec: KVSpec, num_blocks: int) -> KV:
        """Allocates `num_blocks` blocks, block 0 included, filled with zeros.

        Raises:
          DeviceOOM: it does not fit; nothing is allocated.
        """

    def kv_free(self, kv_d: KV) -> None:
        """Frees a KV cache."""

    def kv_read(self, layer: KVLayer, block_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Reads blocks in the canonical layout [N, 2, block_size, kv_heads, head_dim]."""

    def kv_write(
        self, layer_d: KVLayer, block_ids: Sequence[int], data: npt.NDArray[Any]
    ) -> KVLayer:
        """Writes blocks from the canonical layout and returns the new handle."""

    def compile(
        self,
        step: StepFunction,
        bucket: Bucket,
        weights: Mapping[str, Array],
        kv: KV,
        capture: bool = True,
    ) -> CompiledStep:
        """Makes a step ready for a bucket: compiles, captures, or just wraps it.

        Compiling may run the step on padding only: it may write the null block and no other. It
        may go on behind the call: reading an attribute of the step, or running it, then waits and
        raises what compiling raises.

        Args:
          step: the pure function to run.
          bucket: its static sizes.
          weights: the arrays that `run` passes to the step.
          kv: the cache that `run` will be given first; not donated.
          capture: False asks for the cheapest way to run this bucket a few times (`eager`), not
            worth a capture or a compilation. A backend with `static_shapes` ignores it.

        Returns:
          The step. It keeps `step` and `weights` alive.

        Raises:
          CompileError: the step cannot be built for this bucket.
          DeviceOOM: not enough memory for it.
        """

    def close(self) -> None:
        """Frees everything. Calling it twice is harmless."""


MEMBERS: tuple[str, ...] = (
    "caps",
    "xp",
    "ops",
    "memory",
    "upload",
    "download",
    "kv_block_bytes",
    "kv_alloc",
    "kv_free",
    "kv_read",
    "kv_write",
    "compile",
    "close",
)
"""The names of the protocol, in the order of the documentation."""

__all__ = [
    "KV",
    "MEMBERS",
    "Array",
    "Backend",
    "BlockWeightSource",
    "CompiledStep",
    "KVLayer",
    "KVLayerSpec",
    "KVSpec",
    "Partition",
    "SplitStep",
    "StepFunction",
    "WeightBlocks",
    "WeightRole",
    "WeightSource",
]
