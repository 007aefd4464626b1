"""The ops of the backend: traced inline inside a step, compiled on their own elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Final

import jax

from leadframe.platform.batch import StepArrays
from leadframe.platform.reference_ops import reference_ops
from leadframe_tpu import attention_ops, layer_ops
from leadframe_tpu.kernels.attention import Interpret
from leadframe_tpu.namespace import jax_namespace

Op = Callable[..., Any]

jax.tree_util.register_dataclass(
    StepArrays,
    data_fields=[name for name in StepArrays.__dataclass_fields__ if name != "bucket"],
    meta_fields=["bucket"],
)

_STATIC: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("params",),
    "plan": ("params",),
    "rms_norm": ("eps", "offset"),
    "add_rms_norm": ("eps", "offset"),
    "rope_table": ("scaling",),
    "softcap": ("cap",),
    "sample": ("variant",),
    "topk_logprobs": ("k",),
}
"""Arguments that are constants of the model or the bucket."""

_DONATED: Final = frozenset({"kv_append"})


def make_ops(
    *, interpret: Interpret, num_ranks: int, compiler_options: Mapping[str, Any] | None = None
) -> dict[str, Op]:
    """Builds every op but `kv_copy`, which the engine calls between steps.

    Args:
      interpret: how kernels run.
      num_ranks: ranks that share the model; with several, ops only run inside a step.
      compiler_options: for ops that are called on their own.
    """
    functions = reference_ops(jax_namespace())
    functions |= {
        "plan": attention_ops.plan,
        "kv_append": partial(attention_ops.kv_append, interpret=interpret),
        "attention": partial(attention_ops.attention, interpret=interpret),
        "linear": layer_ops.linear,
        "embed": layer_ops.embed if num_ranks == 1 else layer_ops.embed_share,
        "take_rows": layer_ops.take_rows,
        "all_reduce": layer_ops.all_reduce if num_ranks == 1 else layer_ops.sum_ranks,
        "all_gather": layer_ops.all_gather if num_ranks == 1 else layer_ops.join_ranks,
    }
    del functions["kv_copy"]
    options = dict(compiler_options) if compiler_options else None
    return {name: _compiled(name, function, options) for name, function in functions.items()}


def _compiled(name: str, function: Op, options: dict[str, Any] | None) -> Op:
    """Returns an op for both uses.

    Inside a trace it is one traced function, so that a kernel is lowered once and not once a
    layer. Called on its own it is compiled as it stands, with the KV cache donated.
    """
    static = _STATIC.get(name, ())
    inner = jax.jit(function, static_argnames=static)
    donated = (0,) if name in _DONATED else ()
    outer = jax.jit(
        function, static_argnames=static, donate_argnums=donated, compiler_options=options
    )

    @wraps(function, assigned=("__doc__",), updated=())
    def op(*args: Any, **kwargs: Any) -> Any:
        return (inner if _is_traced((args, kwargs)) else outer)(*args, **kwargs)

    op.__name__ = name
    return op


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
