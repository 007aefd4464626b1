"""Ops on the native kernels. What a kernel does not take goes to the torch op of the same name.

Which one serves a call depends on dtypes and on how the operands were made, never on values: a
model takes the same path in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe_cpu.library import Kernel, Library
from leadframe_cpu.merging import LINEAR_LAYOUT
from leadframe_cpu.native_kv import NativeKV
from leadframe_cpu.packed import PackedWeight, Packer
from leadframe_torch import AttentionPlan, layer_ops, sampling_ops
from leadframe_torch import attention as torch_attention
from leadframe_torch.attention_plan import plan as torch_plan

_FLOATS = (torch.float32, torch.bfloat16)
_SILU, _GELU, _SOFTCAP = 0, 1, 2


class Tape(Protocol):
    """Where the calls of a step go while it is recorded."""

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory whose address the recording may keep."""

    def add(self, kernel: Kernel, packed: bytes) -> None:
        """Notes a call that is about to run."""


@dataclass(slots=True)
class NativePlan:
    """A step's batch for the native kernels, and for torch's ops if a layer needs those.

    Attributes:
      arrays: the batch.
      params: constants of the layers that use the plan.
    """

    arrays: StepArrays
    params: AttnParams
    _plain: AttentionPlan | None = field(default=None)

    def plain(self) -> AttentionPlan:
        """The plan of the torch ops, made at the first call."""
        if self._plain is None:
            self._plain = torch_plan(self.arrays, self.params, may_read=True)
        return self._plain


class NativeOps:
    """The op table over a library.

    Attributes:
      products: the kernel of one product, and that of several of the same input.
      tape: set while a step is recorded.
    """

    def __init__(self, library: Library, packer: Packer) -> None:
        self.tape: Tape | None = None
        self._packer = packer

        def short(name: str, layout: str) -> Kernel:
            return Kernel(library, name, layout, is_long=False)

        def long(name: str, layout: str) -> Kernel:
            return Kernel(library, name, layout, is_long=True)

        self._linear = long("lf_linear", LINEAR_LAYOUT)
        self.products = self._linear, long("lf_linear_group", "2q")
        self._norm = short("lf_rms_norm", "8q2d")
        self._rope_table = short("lf_rope_table", "6qd")
        self._rope = short("lf_rope", "9q")
        self._gate = short("lf_gate", "6qd")
        self._take = short("lf_take_rows", "6q")
        self._append = short("lf_kv_append", "10q")
        self._attention = long("lf_attention", "17q2d")
        self._argmax = short("lf_argmax", "5q")
        self._finite = short("lf_finite_rows", "5q")
        self._sample = long("lf_sample", "12q")
        self._logprobs = long("lf_topk_logprobs", "10q")
        self._edit = short("lf_edit_logits", "8q")

    def table(self) -> dict[str, Callable[..., Any]]:
        """The ops by name."""
        layers = "embed take_rows linear rms_norm add_rms_norm rope_table rope silu_mul gelu_mul"
        others = "softcap plan kv_append kv_copy attention"
        sampling = "finite_rows edit_logits argmax sample topk_logprobs"
        names = " ".join((layers, others, sampling))
        return {name: getattr(self, name) for name in names.split()}

    def _run(self, kernel: Kernel, packed: bytes) -> None:
        if self.tape is not None:
            self.tape.add(kernel, packed)
        kernel(packed)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.tape is not None:
            return self.tape.new(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    # --- layers ---------------------------------------------------------------------------

    def embed(self, table: Tensor | PackedWeight, token_ids: Tensor) -> Tensor:
        """Rows of a table [V, E] at int32 [T]; ids outside are clamped."""
        if not isinstance(table, PackedWeight):
            return layer_ops.embed(table, token_ids)
        ids = _packed_ids(token_ids)
        out = self._new((ids.shape[0], table.shape[1]), table.dtype)
        self._run(self._packer.read_kernel, self._packer.pack_rows(table, ids, out))
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of x [T, E] at int32 [N]."""
        if x.dtype not in _FLOATS:
            return layer_ops.take_rows(x, rows)
        x, rows = x.contiguous(), _packed_ids(rows)
        out = self._new((rows.shape[0], x.shape[1]), x.dtype)
        size = x.shape[1] * x.element_size()
        pointers = x.data_ptr(), rows.data_ptr(), out.data_ptr()
        self._run(self._take, self._take.pack(*pointers, rows.shape[0], size, x.shape[0] - 1))
        return out

    def linear(
        self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """X [T, in] times weight [out, in] transposed, plus bias [out]."""
        if not isinstance(weight, PackedWeight):
            return layer_ops.linear(x, weight, bias)
        if not x.is_contiguous():
            x = x.contiguous()
        wide_bias = None if bias is None else bias.float()
        rows, columns = weight.shape
        out = self._new((x.shape[0], rows), x.dtype)
        packed = self._linear.pack(
            x.data_ptr(),
            out.data_ptr(),
            weight.data.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            weight.layout,
            x.shape[0],
            rows,
            columns,
            x.dtype == torch.bfloat16,
        )
        self._run(self._linear, packed)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Root-mean-square norm over the last axis."""
        if not _alike(x, weight):
            return layer_ops.rms_norm(x, weight, eps, offset)
        x = x.contiguous()
        out = self._new(x.shape, x.dtype)
        self._run(self._norm, self._pack_norm(x, None, weight, out, None, eps, offset))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual)."""
        if not _alike(x, weight) or not _alike(x, residual):
            return layer_ops.add_rms_norm(x, residual, weight, eps, offset)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = self._new(x.shape, x.dtype), self._new(x.shape, x.dtype)
        self._run(self._norm, self._pack_norm(x, residual, weight, out, total, eps, offset))
        return out, total

    def _pack_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        out: Tensor,
        total: Tensor | None,
        eps: float,
        offset: float,
    ) -> bytes:
        width = x.shape[-1]
        return self._norm.pack(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            0 if total is None else total.data_ptr(),
            x.numel() // width,
            width,
            x.dtype == torch.bfloat16,
            eps,
            offset,
        )

    def rope_table(
        self, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Cos and sin of positions int32 [T] times inv_freq float32 [R/2]."""
        if inv_freq.dtype != torch.float32:
            return layer_ops.rope_table(positions, inv_freq, scaling)
        positions, inv_freq = _packed_ids(positions), inv_freq.contiguous()
        tokens, half = positions.shape[0], inv_freq.shape[0]
        cos = self._new((tokens, half), torch.float32)
        sin = self._new((tokens, half), torch.float32)
        pointers = (part.data_ptr() for part in (positions, inv_freq, cos, sin))
        self._run(self._rope_table, self._rope_table.pack(*pointers, tokens, half, scaling))
        return cos, sin

    def rope(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the first R dimensions of each head of x [T, H, D]."""
        cos, sin = table
        if x.dtype not in _FLOATS or cos.dtype != torch.float32:
            return layer_ops.rope(x, table)
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out = self._new(x.shape, x.dtype)
        pointers = (part.data_ptr() for part in (x, cos, sin, out))
        is_bf16 = x.dtype == torch.bfloat16
        self._run(self._rope, self._rope.pack(*pointers, *x.shape, cos.shape[1], is_bf16))
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        if not _alike(gate, up):
            return layer_ops.silu_mul(gate, up)
        return self._gated(_SILU, gate, up)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, with the tanh approximation."""
        if not _alike(gate, up):
            return layer_ops.gelu_mul(gate, up)
        return self._gated(_GELU, gate, up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Cap * tanh(x / cap)."""
        if x.dtype not in _FLOATS:
            return layer_ops.softcap(x, cap)
        return self._gated(_SOFTCAP, x, None, cap)

    def _gated(self, kind: int, gate: Tensor, up: Tensor | None, cap: float = 0.0) -> Tensor:
        gate = gate.contiguous()
        up = None if up is None else up.contiguous()
        out = self._new(gate.shape, gate.dtype)
        second = 0 if up is None else up.data_ptr()
        is_bf16 = gate.dtype == torch.bfloat16
        sizes = gate.numel(), kind, is_bf16
        self._run(self._gate, self._gate.pack(gate.data_ptr(), second, out.data_ptr(), *sizes, cap))
        return out

    # --- attention ------------------------------------------------------------------------

    def plan(self, batch: StepArrays, params: AttnParams) -> NativePlan:
        """Returns the batch; the kernels read it as it is."""
        return NativePlan(batch, params)

    def kv_append(
        self, kv_d: NativeKV | Tensor, k: Tensor, v: Tensor, plan: NativePlan
    ) -> NativeKV | Tensor:
        """Writes K and V [T, K, D] to the slots of the batch, in place."""
        if not isinstance(kv_d, NativeKV):
            return torch_attention.kv_append(kv_d, k, v, plan.plain())
        k, v = k.contiguous(), v.contiguous()
        packed = self._append.pack(
            kv_d.data.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            plan.arrays.slots.data_ptr(),
            k.shape[0],
            k.shape[1],
            kv_d.block_size,
            kv_d.head_dim,
            kv_d.data.dtype == torch.bfloat16,
            k.dtype == torch.bfloat16,
        )
        self._run(self._append, packed)
        return kv_d

    def attention(
        self, q: Tensor, kv: NativeKV | Tensor, plan: NativePlan, params: AttnParams
    ) -> Tensor:
        """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
        if not isinstance(kv, NativeKV):
            return torch_attention.attention(q, kv, plan.plain(), params)
        q = q.contiguous()
        out = self._new(q.shape, q.dtype)
        self._run(self._attention, self._pack_attention(q, kv, plan.arrays, params, out))
        return out

    def _pack_attention(
        self, q: Tensor, kv: NativeKV, batch: StepArrays, params: AttnParams, out: Tensor
    ) -> bytes:
        bucket = batch.bucket
        return self._attention.pack(
            q.data_ptr(),
            kv.data.data_ptr(),
            out.data_ptr(),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            bucket.num_tokens,
            bucket.num_seqs,
            bucket.num_decodes,
            batch.block_table.stride(0),
            q.shape[1],
            kv.data.shape[1],
            kv.block_size,
            kv.head_dim,
            params.window or 0,
            q.dtype == torch.bfloat16,
            kv.data.dtype == torch.bfloat16,
            params.scale,
            params.softcap or 0.0,
        )

    def kv_copy(
        self, kv_d: NativeKV | Tensor, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
    ) -> NativeKV | Tensor:
        """Copies block src[i] to block dst[i], in place."""
        if not isinstance(kv_d, NativeKV):
            return torch_attention.kv_copy(kv_d, src, dst)
        source, target = (torch.from_numpy(ids.astype(np.int64)) for ids in (src, dst))
        kv_d.data.index_copy_(0, target, kv_d.data.index_select(0, source))
        return kv_d

    # --- sampling -------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        """int32 [N]: the first index of the largest logit of each row."""
        if logits.dtype not in _FLOATS:
            return sampling_ops.argmax(logits)
        return self._reduced(self._argmax, logits, torch.int32)

    def finite_rows(self, logits: Tensor) -> Tensor:
        """Bool [N]: whether every logit of a row is finite."""
        if logits.dtype not in _FLOATS:
            return sampling_ops.finite_rows(logits)
        return self._reduced(self._finite, logits, torch.bool)

    def _reduced(self, kernel: Kernel, logits: Tensor, dtype: torch.dtype) -> Tensor:
        logits = logits.contiguous()
        out = self._new((logits.shape[0],), dtype)
        is_bf16 = logits.dtype == torch.bfloat16
        self._run(kernel, kernel.pack(logits.data_ptr(), out.data_ptr(), *logits.shape, is_bf16))
        return out

    def edit_logits(
        self, logits_d: Tensor, ids: Tensor, scale: Tensor, add: Tensor, keep_only: Tensor
    ) -> Tensor:
        """Applies penalties, biases and masks to tokens ids [N, A] of each row, in place."""
        if logits_d.dtype != torch.float32 or not logits_d.is_contiguous():
            return sampling_ops.edit_logits(logits_d, ids, scale, add, keep_only)
        # held until the call is over: `contiguous` may have made them
        edits = [part.contiguous() for part in (ids, keep_only, scale, add)]
        pointers = (part.data_ptr() for part in (logits_d, *edits))
        self._run(self._edit, self._edit.pack(*pointers, *logits_d.shape, ids.shape[1]))
        return logits_d

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        min_p: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        variant: Literal["plain", "threshold", "sort"],
    ) -> tuple[Tensor, Tensor]:
        """Draws one token a row of logits [N, V]; returns int32 [N] and bool [N] covered."""
        if logits.dtype not in _FLOATS:
            return sampling_ops.sample(logits, temperature, uniform, min_p, top_k, top_p, variant)
        logits = logits.contiguous()
        rows, vocab = logits.shape
        tokens, covered = self._new((rows,), torch.int32), self._new((rows,), torch.bool)
        filters = (0, 0)
        if variant != "plain" and top_k is not None and top_p is not None:
            filters = (top_p.data_ptr(), top_k.data_ptr())
        num = vocab if variant == "sort" else min(sampling_ops.NUM_CANDIDATES, vocab)
        pointers = (part.data_ptr() for part in (logits, temperature, uniform, min_p))
        results = tokens.data_ptr(), covered.data_ptr()
        sizes = rows, vocab, num, logits.dtype == torch.bfloat16
        self._run(self._sample, self._sample.pack(*pointers, *filters, *results, *sizes))
        return tokens, covered

    def topk_logprobs(
        self, logits: Tensor, targets: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Log-probability and rank of the targets [N], and the k best of each row [N, V]."""
        rows, vocab = logits.shape
        if logits.dtype not in _FLOATS or k > vocab:
            return sampling_ops.topk_logprobs(logits, targets, k)
        logits, targets = logits.contiguous(), _packed_ids(targets)
        logprobs, ranks = self._new((rows,), torch.float32), self._new((rows,), torch.int32)
        ids = self._new((rows, k), torch.int32) if k else None
        top = self._new((rows, k), torch.float32) if k else None
        pointers = [part.data_ptr() for part in (logits, targets, logprobs, ranks)]
        best = (0, 0) if ids is None or top is None else (ids.data_ptr(), top.data_ptr())
        sizes = rows, vocab, k, logits.dtype == torch.bfloat16
        self._run(self._logprobs, self._logprobs.pack(*pointers, *best, *sizes))
        return logprobs, ranks, ids, top


def _packed_ids(ids: Tensor) -> Tensor:
    """The indices as contiguous int32."""
    return ids.to(torch.int32).contiguous()


def _alike(x: Tensor, other: Tensor) -> bool:
    return x.dtype is other.dtype and x.dtype in _FLOATS
