"""The op table of the Triton backends: which wrapper serves which op of the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe_triton import attention, layers, linear, sampling
from leadframe_triton.launch import LaunchContext

_WRAPPERS: Final[tuple[Callable[..., Any], ...]] = (
    attention.kv_append,
    attention.kv_copy,
    attention.attention,
    layers.rms_norm,
    layers.add_rms_norm,
    layers.rope,
    layers.silu_mul,
    layers.gelu_mul,
    sampling.argmax,
    sampling.sample,
    sampling.topk_logprobs,
)


def plan(batch: StepArrays, params: AttnParams) -> StepArrays:
    """The batch: the kernels read tables and lengths where they are."""
    return batch


def triton_ops(context: LaunchContext, *, batch_invariant: bool) -> dict[str, Callable[..., Any]]:
    """Binds the ops to a chip.

    Args:
      context: what every launch needs.
      batch_invariant: also replace the vendor library's matrix product, whose bits depend on
        how many rows there are.
    """
    wrappers = (*_WRAPPERS, linear.linear) if batch_invariant else _WRAPPERS
    bound = {wrapper.__name__: partial(wrapper, context) for wrapper in wrappers}
    return {"plan": plan, **bound}
