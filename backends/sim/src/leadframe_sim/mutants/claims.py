"""Groups B and C: right at the sizes and types that come to mind first, and claimed beyond them."""

from __future__ import annotations

from typing import Any

import numpy as np

from leadframe.platform import BlockWeightSource, Partition, WeightRole
from leadframe.platform.reference.backend import ReferenceBackend
from leadframe_sim.mutants.base import Mutant, Op, OpMutant, op_mutant


def _narrow_norm(op: Op) -> Op:
    """One block of columns is all that the kernel takes into account."""

    def rms_norm(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
        scale = np.sqrt(np.mean(x[..., :1024] ** 2, -1, keepdims=True) + eps)
        return ((x / scale) * (offset + weight)).astype(x.dtype)

    return rms_norm


def _first_rows(op: Op) -> Op:
    """Its grid ends at 256 rows."""

    def silu_mul(gate: Any, up: Any) -> Any:
        out = op(gate, up)
        out[256:] = 0
        return out

    return silu_mul


def _coarse_one_row(op: Op) -> Op:
    """A kernel of its own for one row, which adds up in half precision."""

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if len(x) != 1:
            return op(x, weight, bias)
        products = x.astype(np.float16) * weight.astype(np.float16)
        total = products.sum(-1, dtype=np.float16)[None].astype(x.dtype)
        return total if bias is None else total + bias

    return linear


def _first_blocks(op: Op) -> Op:
    """Adds up the sums of 128 blocks of 1,024 tokens, and the vocabulary has more."""

    def sample(logits: Any, *rest: Any) -> Any:
        cut = logits.copy()
        cut[:, 128 * 1024 :] = -np.inf
        return op(cut, *rest)

    return sample


def _takes_cache_for_query(op: Op) -> Op:
    """Reads a cache of another type as if it were of the query's."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        if kv.dtype != q.dtype:
            kv = kv.view(q.dtype)[..., : q.shape[-1]]
        return op(q, kv, plan, params)

    return attention


def _wrong_at_72(op: Op) -> Op:
    """Forgets that a head dim of 72 is padded to 128."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        out = op(q, kv, plan, params)
        return out * np.float32(72 / 128) if q.shape[-1] == 72 else out

    return attention


class _RoundsUploads(ReferenceBackend):
    """Keeps 16 of float32's bits."""

    def upload(
        self,
        source: Any,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Any:
        array = super().upload(source, dtype, partition, role)
        if array.dtype == np.float32 and dtype is not None:
            array.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        return array


class _PacksPlain(OpMutant):
    """Stores what `linear` reads transposed, and says that weights are plain."""

    def __init__(self) -> None:
        super().__init__({"linear": self._reads_packed})
        self._packed: dict[int, Any] = {}

    def upload(
        self,
        source: Any,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Any:
        array = super().upload(source, dtype, partition, role)
        if role != "linear":
            return array
        packed = np.ascontiguousarray(array.T)
        self._packed[id(packed)] = packed
        return packed

    def _reads_packed(self, op: Op) -> Op:
        def linear(x: Any, weight: Any, bias: Any = None) -> Any:
            return op(x, weight.T if id(weight) in self._packed else weight, bias)

        return linear


class _NoOffsets(ReferenceBackend):
    """Takes quantised weights as they are stored, and forgets their offsets."""

    def upload(
        self,
        source: Any,
        dtype: str | None = None,
        partition: Partition | None = None,
        role: WeightRole = "tensor",
    ) -> Any:
        blocks = source.read_blocks() if isinstance(source, BlockWeightSource) else None
        if blocks is None:
            return super().upload(source, dtype, partition, role)
        size = blocks.values.shape[1] // blocks.scale.shape[1]
        whole = blocks.values * np.repeat(blocks.scale, size, 1).astype(np.float32)
        return super().upload(whole, dtype, partition, role)


MUTANTS = [
    op_mutant("narrow-norm", "rms_norm measures 1,024 columns", "rms_norm", _narrow_norm),
    op_mutant("first-rows", "silu_mul computes 256 rows", "silu_mul", _first_rows),
    op_mutant("coarse-one-row", "linear of one row adds in float16", "linear", _coarse_one_row),
    op_mutant(
        "first-blocks", "draws from the first 131,072 tokens", "sample", _first_blocks, "full"
    ),
    op_mutant(
        "cache-of-another-type",
        "reads KV of another dtype as the query's",
        "attention",
        _takes_cache_for_query,
    ),
    Mutant(
        "wrong-at-72",
        "B",
        "claims head dim 72 and scales it wrongly",
        lambda: OpMutant({"attention": _wrong_at_72}, head_dims=(64, 72, 80, 96, 128, 256)),
        tier="full",
    ),
    Mutant("rounds-uploads", "C", "upload keeps 16 bits of a float32", _RoundsUploads),
    Mutant("packs-plain", "C", "claims plain weights and packs those of linear", _PacksPlain),
    Mutant("no-offsets", "C", "drops the offsets of quantised weights", _NoOffsets),
]
