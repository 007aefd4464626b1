"""What is compiled: every kernel, dtype, head dim and tile, through the wrappers of the ops.

A case launches a wrapper twice with different lengths, on tensors without memory ("meta"). The
second launch must not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from leadframe.platform.batch import Bucket, StepArrays, packed_sizes, unpack
from leadframe.platform.capabilities import AttnParams
from leadframe_triton import attention, layers, linear, sampling
from leadframe_triton.arch import Arch
from leadframe_triton.compile_check.worker import Matrix
from leadframe_triton.launch import LaunchContext
from leadframe_triton.tiles import Kind, Tile, tiles_for

HEAD_DIMS: Final = (64, 80, 96, 128, 256)
_HALF: Final = ("bfloat16", "float16")
_PLAIN: Final = AttnParams.of(0.125)
_FEATURES: Final = AttnParams.of(0.125, window=512, softcap=30.0)
_KV_HEADS, _GROUP, _BLOCK_SIZE, _NUM_BLOCKS = 8, 4, 16, 512
_LARGE_BLOCKS: Final = 1 << 18
"""A layer of more than 2 GiB: Triton addresses smaller tensors by 32-bit offsets on AMD."""

_RAGGED: Final = ((77, 5, 0, 9), (1024, 16, 0, 64))
_DECODE: Final = ((96, 96, 96, 33), (256, 256, 256, 128))
_SPLIT: Final = ((3, 3, 3, 100), (16, 16, 16, 512))
"""Pairs of (T, S, D, P): odd sizes and multiples of 16, which Triton tells apart by default."""

_ROWS: Final = (7, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One op in one configuration; it may launch several kernels.

    Attributes:
      kernel: the op, or which of its kernels.
      config: dtype, shape and tile, for people and for `--match`.
      launch: launches it; called with 0 and 1 for two sets of lengths.
      needs_matrix_unit: its product must use matrix instructions.
      head_dim: elements a head, for attention; 0 otherwise.
      in_standard: belongs to the shorter matrix too.
    """

    kernel: str
    config: str
    launch: Callable[[LaunchContext, int], None]
    needs_matrix_unit: bool = False
    head_dim: int = 0
    in_standard: bool = True

    def __str__(self) -> str:
        return f"{self.kernel} {self.config}"


def cases_for(arch: Arch, matrix: Matrix = "full") -> list[Case]:
    """Returns the cases of an architecture."""
    cases = [*_attention_cases(arch), *_cache_cases(arch), *_layer_cases()]
    return cases if matrix == "full" else [case for case in cases if case.in_standard]


def _attention_cases(arch: Arch) -> Iterator[Case]:
    for kind in ("ragged", "decode"):
        for dim in HEAD_DIMS:
            for dtype in (*_HALF, "float32"):
                yield from _tiles(arch, kind, dim, dtype)
        for dtype in arch.fp8:
            for dim in (64, 128, 256):
                tile = tiles_for(arch, kind, dim, 2)[0]
                yield _attention(kind, dim, "bfloat16", tile, _PLAIN, dtype, dim == 128)


def _tiles(arch: Arch, kind: Kind, dim: int, dtype: str) -> Iterator[Case]:
    element_bytes = 4 if dtype == "float32" else 2
    for place, tile in enumerate(tiles_for(arch, kind, dim, element_bytes)):
        is_main = dtype == "bfloat16" and (place == 0 or dim in (64, 128, 256)) and dim != 96
        is_wide = dtype == "float32" and dim == 64
        yield _attention(kind, dim, dtype, tile, _PLAIN, dtype, is_main or is_wide)
        if dtype == "bfloat16" and arch.vendor == "hip":
            is_main = place == 0 and dim == 128
            yield _attention(kind, dim, dtype, tile, _PLAIN, dtype, is_main, _LARGE_BLOCKS)
        if dtype != "float16":
            is_main = dtype == "bfloat16" and place == 0 and dim in (128, 256)
            yield _attention(kind, dim, dtype, tile, _FEATURES, dtype, is_main)


def _attention(
    kind: Kind,
    dim: int,
    dtype: str,
    tile: Tile,
    params: AttnParams,
    kv_dtype: str,
    in_standard: bool,
    num_blocks: int = _NUM_BLOCKS,
) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        c = replace(c, choose_tile=lambda arch, key: tile)
        for sizes in (_RAGGED,) if kind == "ragged" else (_DECODE, _SPLIT):
            arrays = _arrays(*sizes[variant])
            q = _empty(arrays.bucket.num_tokens, _KV_HEADS * _GROUP, dim, dtype=dtype)
            attention.attention(c, q, _cache(dim, kv_dtype, num_blocks), arrays, params)

    words = [dtype, f"D{dim}", *sorted(params.features), str(tile)]
    if num_blocks == _LARGE_BLOCKS:
        words.insert(1, "kv:large")
    if kv_dtype != dtype:
        words.insert(1, f"kv:{kv_dtype}")
    return Case(f"{kind}_attention", " ".join(words), launch, dtype != "float32", dim, in_standard)


def _cache_cases(arch: Arch) -> Iterator[Case]:
    for kv_dtype in ("bfloat16", "float32", *arch.fp8):
        dtype = kv_dtype if kv_dtype == "float32" else "bfloat16"

        def append(
            c: LaunchContext, variant: int, dtype: str = dtype, kv_dtype: str = kv_dtype
        ) -> None:
            arrays = _arrays(*_RAGGED[variant])
            k = _empty(arrays.bucket.num_tokens, _KV_HEADS, 128, dtype=dtype)
            attention.kv_append(c, _cache(128, kv_dtype), k, k, arrays)

        def copy(c: LaunchContext, variant: int, kv_dtype: str = kv_dtype) -> None:
            blocks = np.arange(_ROWS[variant], dtype=np.int32)
            attention.kv_copy(c, _cache(128, kv_dtype), blocks, blocks)

        yield Case("kv_append", f"{kv_dtype} D128", append)
        yield Case("kv_copy", f"{kv_dtype} D128", copy)


def _layer_cases() -> Iterator[Case]:
    for dtype in (*_HALF, "float32"):
        cases = [
            *(_norm(dtype, width, with_residual=False) for width in (64, 576, 4096, 16384)),
            _norm(dtype, 4096, with_residual=True),
            *(_rope(dtype, dim, rotated) for dim, rotated in ((128, 128), (96, 48))),
            _gate(dtype, layers.silu_mul),
            _gate(dtype, layers.gelu_mul),
            *(_linear(dtype, width) for width in (576, 4096)),
        ]
        for case in cases:
            yield replace(case, in_standard=dtype == "bfloat16")
    yield from _sampling_cases()


def _norm(dtype: str, width: int, *, with_residual: bool) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        x, weight = _empty(_ROWS[variant], width, dtype=dtype), _empty(width, dtype=dtype)
        if with_residual:
            layers.add_rms_norm(c, x, x, weight, 1e-6)
        else:
            layers.rms_norm(c, x, weight, 1e-6)

    return Case("add_rms_norm" if with_residual else "rms_norm", f"{dtype} E{width}", launch)


def _rope(dtype: str, dim: int, rotated: int) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        rows = _ROWS[variant]
        angles = _empty(rows, rotated // 2, dtype="float32")
        layers.rope(c, _empty(rows, 32, dim, dtype=dtype), (angles, angles))

    return Case("rope", f"{dtype} D{dim} R{rotated}", launch)


def _gate(dtype: str, op: Callable[[LaunchContext, Tensor, Tensor], Tensor]) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        x = _empty(_ROWS[variant], 14336, dtype=dtype)
        op(c, x, x)

    return Case(op.__name__, f"{dtype} F14336", launch)


def _linear(dtype: str, width: int) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        x, weight = _empty(_ROWS[variant], width, dtype=dtype), _empty(1000, width, dtype=dtype)
        linear.linear(c, x, weight, _empty(1000, dtype=dtype))

    return Case("linear", f"{dtype} in{width}", launch, needs_matrix_unit=dtype != "float32")


def _sampling_cases() -> Iterator[Case]:
    vocab = 128256

    def argmax(c: LaunchContext, variant: int) -> None:
        sampling.argmax(c, _empty(_ROWS[variant], vocab, dtype="float32"))

    def logprobs(c: LaunchContext, variant: int) -> None:
        rows = _ROWS[variant]
        logits, targets = _empty(rows, vocab, dtype="float32"), _empty(rows, dtype="int32")
        sampling.topk_logprobs(c, logits, targets, 5)

    yield Case("argmax", f"float32 V{vocab}", argmax)
    yield Case("logprob", f"float32 V{vocab}", logprobs)
    for variant in ("plain", "threshold", "sort"):
        yield _sample(variant, vocab)


def _sample(how: Literal["plain", "threshold", "sort"], vocab: int) -> Case:
    def launch(c: LaunchContext, variant: int) -> None:
        rows = _ROWS[variant]
        x, k = _empty(rows, dtype="float32"), _empty(rows, dtype="int32")
        sampling.sample(c, _empty(rows, vocab, dtype="float32"), x, x, x, k, x, how)

    return Case("sample", f"float32 V{vocab} {how}", launch, in_standard=how != "sort")


def _empty(*shape: int, dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _cache(dim: int, dtype: str, num_blocks: int = _NUM_BLOCKS) -> Tensor:
    return _empty(2, num_blocks, _BLOCK_SIZE, _KV_HEADS, dim, dtype=dtype)


def _arrays(num_tokens: int, num_seqs: int, num_decodes: int, num_blocks: int) -> StepArrays:
    bucket = Bucket(num_tokens, num_seqs, num_decodes, num_blocks, 0, "skip")
    return unpack(bucket, _empty(packed_sizes(bucket)[0], dtype="int32"), None)
