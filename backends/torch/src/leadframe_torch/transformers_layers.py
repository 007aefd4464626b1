"""Parts of a Transformers model that are exchanged for ours: linear layers and the base model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from torch import Tensor, nn

from leadframe.platform.capabilities import AttnParams
from leadframe.platform.ops import Ops

ATTRIBUTE: Final = "leadframe_in_progress"
"""The attribute of every layer that holds its `InProgress`."""


class GivenHidden(nn.Module):
    """Takes the place of the base model below the head: returns what it was given.

    The model's own head then runs on rows of our choice, with whatever it does to logits.

    Attributes:
      hidden: [1, N, E].
    """

    hidden: Tensor

    @property
    def decoder(self) -> GivenHidden:
        """Itself: some heads call a part of the base model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> HeadInput:
        """Returns the hidden states that were set before."""
        return HeadInput(self.hidden)


class HeadInput:
    """A base model's output with hidden states only; every other field is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class Running(Protocol):
    """What a model's layers run on: a step, or a probe."""

    @property
    def ops(self) -> Ops:
        """The op table."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attn: AttnParams, mask: object
    ) -> Tensor:
        """Attends in one layer: q, k, v [1, heads, T, D] to [1, T, heads, D]."""


class InProgress:
    """Knows what is running, for the layers of one model, whose calls do not carry it."""

    def __init__(self) -> None:
        self._running: Running | None = None

    def attach(self, model: nn.Module) -> None:
        """Makes every layer of a model know this object."""
        for module in model.modules():
            setattr(module, ATTRIBUTE, self)

    @contextmanager
    def over(self, running: Running) -> Iterator[None]:
        """Names what runs in the `with` block."""
        self._running = running
        try:
            yield
        finally:
            self._running = None

    def get(self) -> Running:
        """Returns what is running."""
        assert self._running is not None, "a layer ran outside a step"
        return self._running


class OpLinear(nn.Module):
    """A linear layer through `ops.linear`, whose weight the backend may have packed.

    It has no `weight`: a model that reads its layers' weights must keep `nn.Linear`.

    Args:
      weight: what `upload` returned.
      bias: [out] or None.
      current: knows what is running.
    """

    def __init__(self, weight: Any, bias: Tensor | None, current: InProgress) -> None:
        super().__init__()
        self.packed, self.bias, self._current = weight, bias, current

    def forward(self, x: Tensor) -> Tensor:
        """X [..., in] to [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = self._current.get().ops.linear(flat, self.packed, self.bias)
        return out.reshape(*x.shape[:-1], -1)


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces every plain linear layer; subclasses may do something else and stay.

    Each is let go before the next one is made, except those that stand in several places.
    """
    parents = [module for module in model.modules() if type(module) is not nn.Linear]
    places = Counter(id(child) for parent in parents for child in parent._modules.values())
    shared: dict[int, tuple[nn.Module, nn.Module]] = {}
    for parent in parents:
        for name in list(parent._modules):
            child = parent._modules[name]
            if type(child) is not nn.Linear:
                continue
            made = shared[id(child)][1] if id(child) in shared else make(child)
            if places[id(child)] > 1:
                shared[id(child)] = child, made  # while it lives, its id is its own
            setattr(parent, name, made)
