"""What a backend can do: a few static facts and one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class AttnParams:
    """Constants of one kind of attention layer. Closed over by the step, never a step input.

    Attributes:
      scale: multiplies the scores q·k.
      window: token i sees keys [i - window + 1, i]; None sees all of [0, i].
      softcap: scores become softcap * tanh(scores / softcap); None leaves them.
      features: names of everything beyond causal attention that a kernel must do for this
        layer: "window", "softcap". A backend that does not list a name is never asked for it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    features: frozenset[str] = frozenset()

    @staticmethod
    def of(scale: float, window: int | None = None, softcap: float | None = None) -> AttnParams:
        """Builds parameters with `features` filled in from the other fields."""
        named = {"window": window, "softcap": softcap}
        features = frozenset(name for name, value in named.items() if value is not None)
        return AttnParams(scale, window, softcap, features)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What one op will be asked to do for one model; the argument of `why_not`.

    Fields that do not concern an op are None or empty.
    """

    op: str
    dtype: str = "float32"
    kv_dtype: str | None = None
    head_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    block_size: int | None = None
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """What it says, for messages; fields that say nothing are left out."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "op"}
        values["features"] = ", ".join(sorted(self.features))
        return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def _no_objection(spec: OpSpec) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Static facts about a backend. Core chooses dtype, block size and buckets from them.

    Attributes:
      family: the array library, such as "numpy", "torch" or "jax"; names no device.
      compute_dtypes: dtypes of weights and activations, best first.
      kv_dtypes: dtypes of the KV cache, best first.
      block_sizes: tokens per block that the kernels take, best first.
      head_dims: head dimensions that attention takes; None means any.
      attention_features: names from `AttnParams.features` that attention implements.
      graph: what `compile` does: "none" returns the function, "record" captures a graph with
        baked addresses, "compile" builds an executable for static shapes.
      static_shapes: every step must fit a bucket that was compiled; there is no eager path.
      deterministic: the same call twice gives the same bits.
      batch_invariant: a sequence's result does not depend on the others in its batch.
      max_graphs: most compiled steps that may live at once, those that differ only in how they
        sample counted once; None means no limit.
      tensor_parallel: the largest `tensor_parallel_size`.
      rank_processes: this backend serves one device of a tensor-parallel group: the core starts a
        process with a backend of its own for each, `Limits.rank` says which one a backend is, and
        they meet in `Limits.rendezvous` when an op first needs the others. False: one backend
        drives all of them.
      plain_weights: `upload` returns the same plain array for every role, so that a tied weight
        can be stored once. False where the "linear" role packs; then no definition takes the place
        of an `embed` or a `linear` of the backend's own.
      asynchronous: `CompiledStep.run` returns while the device still works. The core then makes the
        outputs of the step before in that time; False has them delivered before the next step.
      simulated: numbers of this backend say nothing about silicon (interpreters, simulators);
        the conformance report's evidence level takes this word: "interpreter" or "simulated".
      why_not: a reason why an `OpSpec` cannot be served, or None. Shown to the user.
    """

    family: str
    compute_dtypes: tuple[str, ...] = ("float32",)
    kv_dtypes: tuple[str, ...] = ("float32",)
    block_sizes: tuple[int, ...] = (16,)
    head_dims: tuple[int, ...] | None = None
    attention_features: frozenset[str] = frozenset()
    graph: Literal["none", "record", "compile"] = "none"
    static_shapes: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    max_graphs: int | None = None
    tensor_parallel: int = 1
    rank_processes: bool = False
    plain_weights: bool = False
    asynchronous: bool = False
    simulated: Literal["", "interpreter", "simulated"] = ""
    why_not: Callable[[OpSpec], str | None] = field(default=_no_objection, compare=False)
