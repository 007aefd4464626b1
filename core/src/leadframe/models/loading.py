"""Moves the weights of a checkpoint to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from leadframe.models.checkpoint import Checkpoint
from leadframe.models.library_model import LibraryModel
from leadframe.platform.backend import Array, Backend

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each weight."""


def load_weights(
    backend: Backend, checkpoint: Checkpoint, dtype: str, progress: Progress | None = None
) -> Mapping[str, Array]:
    """Uploads every parameter and constant of a model.

    A library's model loads itself.

    A tied head is uploaded a second time, because a backend may pack what `linear` reads into a
    form that `embed` cannot, unless the backend says that its weights are plain arrays.

    Args:
      backend: the device.
      checkpoint: what `open_checkpoint` returned.
      dtype: element type of the weights on the device.
      progress: told the bytes read so far, of `checkpoint.total_bytes`.

    Raises:
      DeviceOOM: the weights do not fit.
    """
    if isinstance(checkpoint.model, LibraryModel):
        return checkpoint.model.load(backend, dtype, progress)
    model, done = checkpoint.model, 0
    weights = {
        name: backend.upload(value, own_dtype or dtype)
        for name, (value, own_dtype) in model.constants.items()
    }
    for name, parameter in model.parameters.items():
        if parameter.tied_to is not None and backend.caps.plain_weights:
            weights[name] = weights[parameter.tied_to]
            continue
        source = checkpoint.sources[name]
        weights[name] = backend.upload(source, dtype, parameter.partition, parameter.role)
        if parameter.tied_to is None:
            done += source.num_bytes
        if progress is not None:
            progress(done, checkpoint.total_bytes)
    return weights
