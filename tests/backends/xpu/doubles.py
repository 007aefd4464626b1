"""Strict stand-ins for the native libraries' calls on Intel GPUs, over CPU tensors.

They follow what the libraries' sources say, and raise `Misuse` where the real kernels would
corrupt memory, read wild addresses or wait for the device. Results are computed in float64.
"""

from __future__ import annotations

import numpy as np
import torch


class Misuse(AssertionError):
    """What the real kernels answer with a crash or with silence."""


def need(condition, message):
    if not condition:
        raise Misuse(message)


def int32(name, tensor):
    need(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}")
    need(tensor.is_contiguous(), f"{name} is strided")
    return tensor.numpy()


def packed(name, tensor):
    is_packed = tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2]
    need(is_packed and tensor.stride(2) == 1, f"{name} has its heads apart")


def write_nhd(key, value, key_cache, value_cache, slots):
    """`reshape_and_cache_flash`: caches [N, block_size, K, D], int64 slots."""
    need(slots.dtype == torch.int64, f"slots are {slots.dtype}")
    need(slots.shape[0] <= key.shape[0], "more slots than tokens")
    packed("key", key)
    packed("value", value)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        need(cache.is_contiguous(), "the cache is not [N, block_size, K, D] in memory")
        need(cache.dtype == rows.dtype, "cache and rows differ in type")
        blocks, size = cache.shape[:2]
        need(cache.shape[2:] == rows.shape[1:], f"cache {cache.shape}, rows {rows.shape}")
        for row, slot in zip(rows, slots.tolist(), strict=False):
            need(0 <= slot < blocks * size, f"slot {slot} of {blocks * size}")
            cache[slot // size, slot % size] = row


def attend_nhd(out, q, keys, values, starts, lens, table, scale, left, right, cap):
    """Causal paged attention; rows without tokens are skipped, rows without keys are NaN."""
    packed("query", q)
    size, heads = keys.shape[1], q.shape[1]
    group = heads // keys.shape[2]
    for row in range(len(lens)):
        first, last, length = starts[row], starts[row + 1], lens[row]
        if first == last:
            continue
        if length == 0:
            out[first:last] = float("nan")
            continue
        blocks = table[row, : -(-length // size)]
        need(len(blocks) * size >= length, "the table is too short")
        k, v = (side[blocks].reshape(-1, *side.shape[2:])[:length] for side in (keys, values))
        k, v = (np.repeat(side.double().numpy(), group, axis=1) for side in (k, v))
        scores = np.einsum("thd,shd->hts", q[first:last].double().numpy(), k) * scale
        if cap > 0:
            scores = cap * np.tanh(scores / cap)
        position = np.arange(length - (last - first), length)[:, None]
        key = np.arange(length)[None, :]
        sees = key <= position
        if left >= 0:
            sees &= key >= position - left
        if right >= 0:
            sees &= key <= position + right
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        # only what a token sees is multiplied: the null block may hold anything
        v = np.where(sees.any(0)[:, None, None], v, 0.0)
        result = np.einsum("hts,shd->thd", weights, v)
        out[first:last] = torch.from_numpy(result).to(out.dtype)


class IpexXpu:
    """`ipex.llm.modules.PagedAttention` of the XPU build: NHD, in place, returns None.

    Attributes:
      calls: names of the calls, in order.
    """

    def __init__(self):
        self.calls = []

    def reshape_and_cache(self, *args, **kwargs):
        raise Misuse("reads a layout that flash_attn_varlen_func does not")

    def reshape_and_cache_flash(
        self,
        key,
        value,
        key_cache,
        value_cache,
        slots,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
    ):
        self.calls.append("write")
        need(kv_cache_dtype == "auto", kv_cache_dtype)
        write_nhd(key, value, key_cache, value_cache, slots)

    def single_query_cached_kv_attention(
        self,
        output,
        query,
        key_cache,
        value_cache,
        head_mapping,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
        ky_dtype="auto",
        window_size=-1,
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ):
        raise Misuse("ignores the window, reads another layout and waits for head_mapping.sum()")

    def flash_attn_varlen_func(
        self,
        output,
        query,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        scale,
        is_causal,
        block_table,
        alibi_slopes=None,
        window_size_left=-1,
        window_size_right=-1,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ):
        self.calls.append("varlen")
        need(query.dtype in (torch.float16, torch.bfloat16), f"queries are {query.dtype}")
        need(query.dtype == k_cache.dtype == output.dtype, "types differ")
        need(query.shape[-1] % 64 == 0, "copies every used block of the cache")
        need(k_cache.is_contiguous() and v_cache.is_contiguous(), "the cache is not NHD in memory")
        need(k_cache.shape[2:] == (k_cache.shape[2], query.shape[2]), "the cache is not NHD")
        need(is_causal is True and alibi_slopes is None, "not implemented")
        starts, sums = int32("cu_seqlens_q", cu_seqlens_q), int32("cu_seqlens_kv", cu_seqlens_kv)
        table, lens = int32("block_table", block_table), np.diff(sums)
        need(table.min() >= 0, "the table holds -1")
        need(np.diff(starts).max() <= max_seqlen_q, "max_seqlen_q is too small")
        need(lens.max() <= max_seqlen_kv, "max_seqlen_kv is too small")
        need(max_seqlen_kv >= k_cache.shape[1], "max_seqlen_kv is below a block")
        attend_nhd(
            output,
            query,
            k_cache,
            v_cache,
            starts,
            lens,
            table,
            scale,
            window_size_left,
            window_size_right,
            softcap,
        )


class VllmXpu:
    """vllm-xpu-kernels: FlashAttention's signature, its path for speculative decoding included.

    Attributes:
      missing: configurations without a kernel.
      speculative_tokens: as in the library.
    """

    def __init__(self, missing=()):
        self.missing = set(missing)
        self.speculative_tokens = 16

    def reshape_and_cache_flash(self, *args):
        need(len(args) == 8, f"{len(args)} arguments")
        key, value, key_cache, value_cache, slots, kind, k_scale, v_scale = args
        need(kind == "auto", kind)
        need(all(isinstance(s, torch.Tensor) for s in (k_scale, v_scale)), "scales are floats")
        write_nhd(key, value, key_cache, value_cache, slots)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        block_table=None,
        out=None,
    ):
        need(q.dtype in (torch.float16, torch.bfloat16), f"queries are {q.dtype}")
        need(q.dtype == k.dtype == v.dtype, "types differ")
        need(k.is_contiguous() and k.shape[1] % 16 == 0, "blocks are not multiples of 16")
        need(cu_seqlens_k is None and causal, "not a paged causal call")
        starts, lens = int32("cu_seqlens_q", cu_seqlens_q), int32("seqused_k", seqused_k)
        table, rows = int32("block_table", block_table), len(starts) - 1
        need(np.diff(starts).max() <= max_seqlen_q, "max_seqlen_q is too small")
        need(lens.max() <= max_seqlen_k, "max_seqlen_k is too small")
        if 1 < max_seqlen_q <= self.speculative_tokens and len(q) == rows * max_seqlen_q:
            starts = np.arange(rows + 1) * max_seqlen_q  # it takes all rows for equally long
        left, right = (-1, -1) if window_size is None else window_size
        attend_nhd(out, q, k, v, starts, lens, table, softmax_scale, left, right, softcap)
        return out


class Untouchable:
    """An API of which no call may happen."""

    def __getattr__(self, name):
        def call(*args, **kwargs):
            raise Misuse(f"{name} was called")

        return call
