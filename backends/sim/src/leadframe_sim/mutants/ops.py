"""Group B: kernels with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from leadframe_sim.mutants.base import Op, op_mutant


def _plan(change: Callable[[Any], Any]) -> Callable[[Op], Op]:
    """Attention over a changed batch."""
    return lambda op: lambda q, kv, plan, params: op(q, kv, change(plan), params)


def _params(**changes: Any) -> Callable[[Op], Op]:
    """Attention with changed constants."""
    return lambda op: lambda q, kv, plan, params: op(q, kv, plan, replace(params, **changes))


def _window(by: int) -> Callable[[Op], Op]:
    def wrap(op: Op) -> Op:
        def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
            if params.window is not None:
                params = replace(params, window=max(1, params.window + by))
            return op(q, kv, plan, params)

        return attention

    return wrap


def _near_only(op: Op) -> Op:
    """Has room for 700 scores: what lies further back is not seen."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        window = 700 if params.window is None else min(700, params.window)
        return op(q, kv, plan, replace(params, window=window))

    return attention


def _slots(change: Callable[[Any, Any], Any]) -> Callable[[Op], Op]:
    """kv_append to changed slots."""

    def wrap(op: Op) -> Op:
        def kv_append(kv_d: Any, k: Any, v: Any, plan: Any) -> Any:
            return op(kv_d, k, v, replace(plan, slots=change(plan.slots, kv_d)))

        return kv_append

    return wrap


def _wrong_head(op: Op) -> Op:
    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        kv_heads = kv.shape[2] // 2
        order = np.argsort(np.arange(q.shape[1]) % kv_heads, kind="stable")
        out = np.empty_like(q)
        out[:, order] = op(q[:, order], kv, plan, params)
        return out

    return attention


def _leaks_unread(op: Op) -> Op:
    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        with np.errstate(all="ignore"):
            return op(q, kv, plan, params) + 0.0 * kv[plan.block_table.reshape(-1)].sum()

    return attention


def _reads_null_block(op: Op) -> Op:
    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        with np.errstate(all="ignore"):
            return op(q, kv, plan, params) + 1e-3 * kv[0].mean()

    return attention


def _rounds(op: Op) -> Op:
    def rounded(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs).astype(ml_dtypes.bfloat16).astype(np.float32)

    return rounded


def _no_max(op: Op) -> Op:
    """Softmax without subtracting the maximum, seen as an overflow for large scores."""

    def attention(q: Any, kv: Any, plan: Any, params: Any) -> Any:
        out = op(q, kv, plan, params)
        with np.errstate(all="ignore"):
            largest = np.abs(q).max() * np.abs(np.nan_to_num(kv, posinf=0, neginf=0)).max()
        return np.where(largest * params.scale > 88, np.nan, out)

    return attention


def _swaps_last_head(op: Op) -> Op:
    def kv_append(kv_d: Any, k: Any, v: Any, plan: Any) -> Any:
        k, v = k.copy(), v.copy()
        k[:, -1], v[:, -1] = v[:, -1].copy(), k[:, -1].copy()
        return op(kv_d, k, v, plan)

    return kv_append


def _half_copy(op: Op) -> Op:
    def kv_copy(kv_d: Any, src: Any, dst: Any) -> Any:
        half = kv_d.shape[1] // 2
        kv_d[dst, :half] = kv_d[src, :half]
        return kv_d

    return kv_copy


def _shorter(plan: Any) -> Any:
    return replace(plan, seq_lens=np.where(plan.seq_lens > 1, plan.seq_lens - 1, plan.seq_lens))


def _first_table(plan: Any) -> Any:
    return replace(plan, block_table=np.repeat(plan.block_table[:1], len(plan.block_table), 0))


def _edge(plan: Any) -> Any:
    lens = plan.seq_lens
    return replace(plan, seq_lens=np.where((lens % 16 == 0) & (lens > 1), lens - 1, lens))


def _swaps_blocks(plan: Any) -> Any:
    table = plan.block_table.copy()
    table[:, -2:] = table[:, -2:][:, ::-1]
    return replace(plan, block_table=table)


def _drops_last_write(slots: Any, kv: Any) -> Any:
    slots = slots.copy()
    live = np.flatnonzero(slots)
    slots[live[-1:]] = 0
    return slots


def _interleaved(op: Op) -> Op:
    def rope(x: Any, table: Any) -> Any:
        half = table[0].shape[-1]
        pairs = np.concatenate([x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]], -1)
        return op(np.concatenate([pairs, x[..., 2 * half :]], -1), table)

    return rope


def _half_precision(op: Op) -> Op:
    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        out = (x.astype(np.float16) @ weight.astype(np.float16).T).astype(np.float32)
        return out if bias is None else out + bias

    return linear


def _no_bias(op: Op) -> Op:
    return lambda x, weight, bias=None: op(x, weight)


def _no_offset(op: Op) -> Op:
    return lambda x, weight, eps, offset=0.0: op(x, weight, eps)


def _norms_unrounded(op: Op) -> Op:
    def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
        norm, _ = op(x, residual, weight, eps, offset)
        return norm, residual

    return add_rms_norm


def _wraps_ids(op: Op) -> Op:
    return lambda table, ids: table[ids]


def _last_of_ties(op: Op) -> Op:
    def argmax(logits: Any) -> Any:
        flipped = np.argmax(logits[:, ::-1], axis=-1)
        return (logits.shape[1] - 1 - flipped).astype(np.int32)

    return argmax


def _wide_ids(op: Op) -> Op:
    return lambda logits: op(logits).astype(np.int64)


def _only_nan(op: Op) -> Op:
    return lambda logits: ~np.isnan(logits).any(-1)


def _sorted_draw(op: Op) -> Op:
    """Inverts the CDF from the most likely token down."""

    def sample(logits: Any, t: Any, u: Any, min_p: Any, k: Any, p: Any, variant: str) -> Any:
        order = np.argsort(-logits, axis=-1)
        drawn, covered = op(np.take_along_axis(logits, order, -1), t, u, min_p, k, p, variant)
        return np.take_along_axis(order, drawn[:, None], -1)[:, 0].astype(np.int32), covered

    return sample


def _unclamped_draw(op: Op) -> Op:
    """Draws the token after the last one when the uniform is near one."""

    def sample(logits: Any, t: Any, u: Any, *rest: Any) -> Any:
        drawn, covered = op(logits, t, u, *rest)
        return np.where(u > 0.99999, logits.shape[1] - 1, drawn).astype(np.int32), covered

    return sample


def _always_covered(op: Op) -> Op:
    def sample(*args: Any) -> Any:
        drawn, covered = op(*args)
        return drawn, np.ones_like(covered)

    return sample


def _ignores(position: int, value: float) -> Callable[[Op], Op]:
    """A sampler that does not look at one of its parameters."""

    def wrap(op: Op) -> Op:
        def sample(*args: Any) -> Any:
            given = list(args)
            given[position] = np.full_like(given[position], value)
            return op(*given)

        return sample

    return wrap


def _rank_with_ties(op: Op) -> Op:
    def topk_logprobs(logits: Any, targets: Any, k: int) -> Any:
        logprob, _, ids, best = op(logits, targets, k)
        chosen = np.take_along_axis(logits, targets[:, None], -1)
        return logprob, (logits >= chosen).sum(-1).astype(np.int32), ids, best

    return topk_logprobs


def _always_divides(op: Op) -> Op:
    def edit_logits(logits: Any, ids: Any, scale: Any, add: Any, keep: Any) -> Any:
        old = np.take_along_axis(logits, ids, -1)
        return op(logits, ids, np.where(old > 0, scale, 1 / scale), add, keep)

    return edit_logits


def _ignores_keep(op: Op) -> Op:
    return lambda logits, ids, scale, add, keep: op(logits, ids, scale, add, np.zeros_like(keep))


def _big_endian_mask(op: Op) -> Op:
    return lambda logits, mask: op(logits, mask.byteswap())


def _no_sign_bit(op: Op) -> Op:
    """Tests a word's last bit by whether the shifted word is positive."""
    return lambda logits, mask: op(logits, mask & np.int32(2**31 - 1))


MUTANTS = [
    op_mutant(
        "block-off-by-one",
        "reads the block before",
        "attention",
        _plan(lambda p: replace(p, block_table=np.maximum(p.block_table - 1, 0))),
    ),
    op_mutant(
        "blocks-swapped", "swaps the last two blocks of a table", "attention", _plan(_swaps_blocks)
    ),
    op_mutant("one-table", "uses the first row's table for all", "attention", _plan(_first_table)),
    op_mutant("wrong-gqa-head", "query head h reads KV head h mod K", "attention", _wrong_head),
    op_mutant(
        "sees-the-future",
        "the causal mask is one too far",
        "attention",
        _plan(lambda p: replace(p, seq_lens=p.seq_lens + (p.seq_lens > 0))),
    ),
    op_mutant("misses-itself", "the causal mask is one too short", "attention", _plan(_shorter)),
    op_mutant("block-edge", "drops the last token at a block edge", "attention", _plan(_edge)),
    op_mutant(
        "ignores-window", "claims windows and ignores them", "attention", _params(window=None)
    ),
    op_mutant("window-too-wide", "the window is one too wide", "attention", _window(1)),
    op_mutant("window-too-narrow", "the window is one too narrow", "attention", _window(-1)),
    op_mutant(
        "ignores-softcap", "claims softcap and ignores it", "attention", _params(softcap=None)
    ),
    op_mutant("near-only", "sees the last 700 tokens only", "attention", _near_only, tier="full"),
    op_mutant("no-scale", "forgets to scale the scores", "attention", _params(scale=1.0)),
    op_mutant("softmax-overflows", "softmax without the maximum", "attention", _no_max),
    op_mutant("bf16-attention", "rounds attention to bfloat16", "attention", _rounds),
    op_mutant(
        "reads-unread-slots", "masks scores but multiplies unread V", "attention", _leaks_unread
    ),
    op_mutant(
        "reads-null-block", "adds a little of the null block", "attention", _reads_null_block
    ),
    op_mutant(
        "padding-writes-elsewhere",
        "padding writes to the last block",
        "kv_append",
        _slots(lambda s, kv: np.where(s == 0, kv.shape[0] * kv.shape[1] - 1, s)),
    ),
    op_mutant(
        "slot-off-by-one",
        "the last offset of a block goes one too low",
        "kv_append",
        _slots(lambda s, kv: np.where(s % kv.shape[1] == kv.shape[1] - 1, s - 1, s)),
    ),
    op_mutant(
        "drops-a-write",
        "the last token's K/V is not written",
        "kv_append",
        _slots(_drops_last_write),
    ),
    op_mutant("swaps-k-and-v", "swaps K and V of the last head", "kv_append", _swaps_last_head),
    op_mutant("half-copy", "kv_copy copies half a block", "kv_copy", _half_copy),
    op_mutant("fp16-linear", "linear accumulates in float16", "linear", _half_precision),
    op_mutant("no-bias", "linear ignores its bias", "linear", _no_bias),
    op_mutant("no-norm-offset", "rms_norm ignores its offset", "rms_norm", _no_offset),
    op_mutant(
        "lost-residual",
        "add_rms_norm returns the residual, not the sum",
        "add_rms_norm",
        _norms_unrounded,
    ),
    op_mutant("interleaved-rope", "rope pairs neighbours", "rope", _interleaved),
    op_mutant("ids-not-clamped", "embed does not clamp ids", "embed", _wraps_ids),
    op_mutant("last-of-ties", "argmax takes the last of ties", "argmax", _last_of_ties),
    op_mutant("int64-tokens", "argmax returns int64", "argmax", _wide_ids),
    op_mutant("inf-is-finite", "finite_rows looks for NaN only", "finite_rows", _only_nan),
    op_mutant("sorted-draw", "draws from the most likely token down", "sample", _sorted_draw),
    op_mutant("draws-dropped-tokens", "draws past the last kept token", "sample", _unclamped_draw),
    op_mutant(
        "always-covered", "never says that candidates do not suffice", "sample", _always_covered
    ),
    op_mutant("ignores-temperature", "samples at temperature 1", "sample", _ignores(1, 1.0)),
    op_mutant("ignores-min-p", "samples without min_p", "sample", _ignores(3, 0.0)),
    op_mutant("ignores-top-k", "samples without top_k", "sample", _ignores(4, 0)),
    op_mutant("ignores-top-p", "samples without top_p", "sample", _ignores(5, 1.0)),
    op_mutant("rank-counts-ties", "ranks count equal logits", "topk_logprobs", _rank_with_ties),
    op_mutant(
        "divides-negatives", "penalties divide negative logits too", "edit_logits", _always_divides
    ),
    op_mutant("ignores-allowed-ids", "keep_only is ignored", "edit_logits", _ignores_keep),
    op_mutant(
        "mask-bytes-swapped", "reads a mask's words in big-endian", "mask_logits", _big_endian_mask
    ),
    op_mutant("mask-sign-bit", "lets token 31 of each word through", "mask_logits", _no_sign_bit),
]
