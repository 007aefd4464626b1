"""Opens the kit for a device that the user named."""

from __future__ import annotations

import os
from collections.abc import Sequence

from leadframe.conformance.kit import Kit
from leadframe.errors import DeviceNotFound
from leadframe.platform import Backend, Limits, Selection, create_backend, select_device

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
STAND_IN = "interpreter"
"""The name of a platform's device that runs its kernels without its silicon."""


def open_kit(
    device: str,
    options: Sequence[str] = (),
    seed: int = 0,
    *,
    chosen: tuple[Selection, str] | None = None,
) -> Kit:
    """Returns a kit whose backends are created on demand.

    Args:
      device: the `--device` value.
      options: KEY=VALUE texts.
      seed: base of all random numbers.
      chosen: what `choose` made of it; None asks it.

    Raises:
      PlatformError: the device cannot be used.
    """
    selection, stand_in = chosen or choose(device)
    device = f"{device}:{STAND_IN}" if stand_in else device
    values = dict(pair.split("=", 1) for pair in options)

    def create() -> Backend:
        return create_backend(selection, values, LIMITS)

    return Kit(
        open=create,
        device=device,
        stand_in=stand_in,
        plugin=selection.plugin,
        kernels=selection.kernels(),
        notes=selection.plugin.conformance(),
        seed=seed,
        options=tuple(options),
        probe_args=("--device", device, *(text for pair in options for text in ("-o", pair))),
    )


def choose(device: str, *, require_hardware: bool = False) -> tuple[Selection, str]:
    """Selects what a run is on, and says why it is an interpreter where it was not asked for.

    A platform that is named without an index and has no device here is proved on its interpreter,
    if it has one.

    Args:
      device: the `--device` value.
      require_hardware: take no interpreter in a device's place.

    Raises:
      PlatformError: the device cannot be used.
    """
    try:
        return select_device(device, os.environ), ""
    except DeviceNotFound as missing:
        if require_hardware or ":" in device:
            raise
        return _interpreter(device, missing), str(missing).partition("\n")[0]


def _interpreter(platform: str, missing: DeviceNotFound) -> Selection:
    """Returns the platform's interpreter; what the device's absence raised where it has none."""
    try:
        return select_device(f"{platform}:{STAND_IN}", os.environ)
    except DeviceNotFound:
        raise missing from None


__all__ = ["LIMITS", "STAND_IN", "choose", "open_kit"]
