"""Runs an architecture without a native file: Transformers' own model, our paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from leadframe.errors import UnsupportedModel
from leadframe.platform.backend import KV, Array, Backend
from leadframe.platform.batch import StepArrays
from leadframe.platform.model_impl import ModelFacts
from leadframe.platform.ops import Ops
from leadframe_torch.transformers_attention import HeadStep, Step, register
from leadframe_torch.transformers_layers import GivenHidden, InProgress
from leadframe_torch.transformers_probe import Probed, detach_base, probe
from leadframe_torch.transformers_weights import Progress, WeightMover, read_on_host

_LOADED: Final = "model"
"""The one entry of the weights: the module that holds them all."""


class TransformersModel:
    """A causal language model of Transformers as the runner sees it.

    Args:
      path: a Hugging Face directory with safetensors.

    Attributes:
      family: the arrays it computes with.
      facts: sizes and attention.

    Raises:
      UnsupportedModel: Transformers does not know the architecture, or it needs something that
        paged attention does not do.
    """

    family: Final = "torch"

    def __init__(self, path: Path) -> None:
        register()
        self._path = path
        self._probed: Probed = probe(_config(path))

    @property
    def facts(self) -> ModelFacts:
        """Sizes and attention."""
        return self._probed.facts

    def load(
        self, backend: Backend, dtype: str, progress: Progress | None = None
    ) -> Mapping[str, Array]:
        """Reads the weights onto a device."""
        model = read_on_host(self._path, dtype)
        return {_LOADED: _Loaded(model, backend, dtype, progress, self._probed.has_op_linears)}

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""
        loaded: _Loaded = weights[_LOADED]
        return loaded.forward(ops, kv, arrays)

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""
        loaded: _Loaded = weights[_LOADED]
        return loaded.logits(ops, rows)


class _Loaded:
    """A model on its device, in two halves: below the head, and the head."""

    def __init__(
        self,
        model: Any,
        backend: Backend,
        dtype: str,
        progress: Progress | None,
        op_linears: bool,
    ) -> None:
        self._current = InProgress()
        self._current.attach(model)
        mover = WeightMover(backend, dtype, progress)
        mover.move(model, self._current, op_linears=op_linears)
        self._held = mover.held
        self._given, self._model = GivenHidden(), model
        self._base = detach_base(model, self._given)

    def forward(self, ops: Ops, kv: KV, arrays: StepArrays) -> tuple[Tensor, KV]:
        step = Step(ops, arrays, list(kv))
        with self._current.over(step):
            hidden: Tensor = self._base(
                input_ids=arrays.token_ids.long().unsqueeze(0),
                position_ids=arrays.positions.long().unsqueeze(0),
                use_cache=False,
            ).last_hidden_state
        return hidden[0], step.kv

    def logits(self, ops: Ops, rows: Tensor) -> Tensor:
        self._given.hidden = rows.unsqueeze(0)
        ids = torch.zeros((1, rows.shape[0]), dtype=torch.int64, device=rows.device)
        with self._current.over(HeadStep(ops)):
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0]


def _config(path: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a config class raises about a value
        raise UnsupportedModel(
            f"Transformers {transformers.__version__} cannot read {path / 'config.json'}: "
            f"{str(error)[:500]}"
        ) from error
