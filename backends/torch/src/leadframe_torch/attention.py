"""Paged attention in plain torch: gather the keys of a group, then one product for all of it.

A KV layer is one tensor [2, num_blocks, block_size, kv_heads, head_dim], K first. The query heads
that share a KV head are folded into the query axis, so keys are never repeated. Keys that nobody
may see are zeroed after the gather: a weight of zero times a NaN would be a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from leadframe.platform.capabilities import AttnParams
from leadframe_torch.attention_plan import AttentionPlan, Group


def kv_append(kv_d: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Writes K and V [T, K, D] to the slots of the batch, in place."""
    flat = kv_d.flatten(1, 2)
    for side, rows in enumerate((k, v)):
        flat[side].index_copy_(0, plan.slots, rows.to(kv_d.dtype))
    return kv_d


def kv_copy(kv_d: Tensor, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> Tensor:
    """Copies block src[i] to block dst[i], in place."""
    source, target = (torch.from_numpy(ids.astype(np.int64)).to(kv_d.device) for ids in (src, dst))
    return kv_d.index_copy_(1, target, kv_d.index_select(1, source))


def attention(q: Tensor, kv: Tensor, plan: AttentionPlan, params: AttnParams) -> Tensor:
    """Causal paged attention of q [T, H, D]; returns [T, H, D]."""
    groups = plan.groups(kv.shape[2])
    if len(groups) == 1:
        return _attend(q, kv, groups[0], params)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        out[group.tokens] = _attend(q[group.tokens], kv, group, params)
    return out


def _attend(q: Tensor, kv: Tensor, group: Group, params: AttnParams) -> Tensor:
    """Attention of one group's queries [n, H, D]; zeros where a query sees nothing."""
    k, v = (_gather(side, group).to(q.dtype) for side in kv.unbind(0))
    num, heads, dim = q.shape
    kv_heads = kv.shape[3]
    folded = q.reshape(num, kv_heads, heads // kv_heads, dim)
    if group.is_decode:  # [n, K, G, D] against [n, K, L, D]
        k, v = (side.view(num, -1, kv_heads, dim).transpose(1, 2) for side in (k, v))
        out = _product(folded, k, v, group.sees[:, None, None, :], params)
    else:  # [K, G, n, D] against [K, 1, L, D]
        shape = (kv_heads, heads // kv_heads, k.shape[0], dim)
        k, v = (side.transpose(0, 1).unsqueeze(1).expand(shape) for side in (k, v))
        out = _product(folded.permute(1, 2, 0, 3), k, v, group.sees, params).permute(2, 0, 1, 3)
    return out.reshape(num, heads, dim)


def _gather(side: Tensor, group: Group) -> Tensor:
    """Keys or values [R * L, K, D] of a group's blocks; zeros where nobody looks."""
    rows = side.index_select(0, group.blocks).flatten(0, 1)
    return rows.masked_fill_(group.unread.view(-1, 1, 1), 0.0)


def _product(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, params: AttnParams) -> Tensor:
    if params.softcap is not None:
        return _capped_product(q, k, v, sees, params)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=params.scale)
    # a row that sees nothing is NaN in some of torch's kernels and 0 in others
    return out.masked_fill_(~sees.any(dim=-1, keepdim=True), 0.0)


def _capped_product(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, params: AttnParams) -> Tensor:
    assert params.softcap is not None, "only for capped scores"
    scores = (q.float() @ k.float().transpose(-1, -2)) * params.scale
    scores = torch.tanh(scores / params.softcap) * params.softcap
    # the lowest finite value, so that a row that sees nothing has no inf - inf
    scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1).masked_fill(~sees, 0.0)
    return (weights @ v.float()).to(q.dtype)


OPS: Final[dict[str, Callable[..., Any]]] = {
    op.__name__: op for op in (kv_append, kv_copy, attention)
}
