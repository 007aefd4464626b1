"""Opens the kit for a device that the user named."""

from __future__ import annotations

import os
from collections.abc import Sequence

from leadframe.conformance.kit import Kit
from leadframe.platform import Backend, Limits, create_backend, select_device

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)


def open_kit(device: str, options: Sequence[str] = (), seed: int = 0) -> Kit:
    """Selects a device and returns a kit whose backends are created on demand.

    Args:
      device: the `--device` value.
      options: KEY=VALUE texts.
      seed: base of all random numbers.

    Raises:
      PlatformError: the device cannot be used.
    """
    selection = select_device(device, os.environ)
    values = dict(pair.split("=", 1) for pair in options)

    def create() -> Backend:
        return create_backend(selection, values, LIMITS)

    return Kit(
        open=create,
        device=device,
        plugin=selection.plugin,
        kernels=selection.kernels(),
        notes=selection.plugin.conformance(),
        seed=seed,
        options=tuple(options),
        probe_args=("--device", device, *(text for pair in options for text in ("-o", pair))),
    )


__all__ = ["LIMITS", "open_kit"]
