"""Reads a Transformers model's weights and moves them to a device, one after the other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy.typing as npt
import torch
from torch import Tensor, nn

from leadframe.errors import CheckpointError
from leadframe.platform.backend import Array, Backend, WeightRole
from leadframe_torch.dtypes import torch_dtype
from leadframe_torch.transformers_attention import STEP_ATTENTION
from leadframe_torch.transformers_layers import InProgress, OpLinear, replace_linears

Progress = Callable[[int, int], None]

_HARMLESS: Final = re.compile(r"\.(rotary_emb\.inv_freq|attention\.(bias|masked_bias))$")
"""Tables that old checkpoints stored, and that models compute."""
_SHOWN: Final = 8


def read_on_host(path: Path, dtype: str) -> Any:
    """Reads a model with Transformers, which knows how each one's weights are stored.

    Raises:
      CheckpointError: what is stored is not what the model needs.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _quiet():
        try:
            model, found = auto.from_pretrained(
                path,
                dtype=torch_dtype(dtype),
                attn_implementation=STEP_ATTENTION,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever a loader raises about a file
            raise CheckpointError(f"{path} cannot be loaded: {str(error)[:1000]}") from error
    _check(path, found)
    return model.eval()


def _check(path: Path, found: dict[str, Any]) -> None:
    if found["missing_keys"]:
        raise CheckpointError(f"{path} lacks {_some(found['missing_keys'])}")
    mismatched = [str(entry[0]) for entry in found.get("mismatched_keys", ())]
    if mismatched:
        raise CheckpointError(f"{path}: {_some(mismatched)} have other shapes than the config says")
    unused = [name for name in found["unexpected_keys"] if not _HARMLESS.search(name)]
    if unused:
        raise CheckpointError(
            f"{path} holds {_some(unused)}, which the model that its config describes does not "
            "have; serving it without them would be wrong"
        )
    if found.get("error_msgs"):
        raise CheckpointError(f"{path} cannot be loaded: {_some(found['error_msgs'])}")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{', '.join(listed[:_SHOWN])}{more}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Transformers' bar and report: what they say is raised or shown by us."""
    from transformers.utils import logging

    messages: Any = logging
    had_bar, level = messages.is_progress_bar_enabled(), messages.get_verbosity()
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if had_bar:
            messages.enable_progress_bar()


class WeightMover:
    """Moves one model's weights, and lets go of each on the host once it is on the device.

    Args:
      backend: the device.
      dtype: element type of weights.
      progress: called with (done, total) bytes.

    Attributes:
      held: what was uploaded. A backend counts the arrays that it handed out, and a module wraps
        them: they must live as long as the module.
    """

    def __init__(self, backend: Backend, dtype: str, progress: Progress | None) -> None:
        self._backend, self._dtype, self._progress = backend, dtype, progress
        self.held: list[Array] = []
        self._done = self._total = 0
        self._tied: set[int] = set()
        self._moved: dict[tuple[int, WeightRole], tuple[Tensor, Array]] = {}

    def move(self, model: nn.Module, current: InProgress, *, op_linears: bool) -> None:
        """Moves all of a model.

        Args:
          model: on the host; its linear layers are replaced.
          current: knows what is running, for linear layers.
          op_linears: whether they run as `ops.linear`.
        """
        self._total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        self._tied = _tied(model)
        if op_linears:
            replace_linears(model, lambda layer: self._linear(layer, current))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = nn.Parameter(self._upload(parameter), requires_grad=False)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._upload(buffer)
        self._moved.clear()

    def _linear(self, layer: nn.Linear, current: InProgress) -> nn.Module:
        if layer.weight.dtype != torch_dtype(self._dtype):
            return layer  # kept in another type by the model, which converts its inputs
        bias = None if layer.bias is None else self._upload(layer.bias)
        return OpLinear(self._upload(layer.weight, "linear"), bias, current)

    def _upload(self, tensor: Tensor, role: WeightRole = "tensor") -> Array:
        """Uploads a tensor; a tied one once a role, or once where roles make no difference."""
        if id(tensor) not in self._tied:
            return self._send(tensor, role)
        key = id(tensor), "tensor" if self._backend.caps.plain_weights else role
        if key not in self._moved:
            self._moved[key] = tensor, self._send(tensor, role)  # while it lives, its id is its own
        return self._moved[key][1]

    def _send(self, tensor: Tensor, role: WeightRole) -> Array:
        moved = self._backend.upload(host_array(tensor), role=role)
        self.held.append(moved)
        self._done = min(self._done + tensor.nbytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return moved


def _tied(model: nn.Module) -> set[int]:
    """The ids of parameters that stand in several places."""
    ids = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return {i for i, count in Counter(ids).items() if count > 1}


def host_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Views a host tensor as a NumPy array, bfloat16 as ml_dtypes' type."""
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = plain.numpy()
    return array
