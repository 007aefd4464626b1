"""The version of the platform contract that this core serves."""

from __future__ import annotations

from typing import Final

CONTRACT: Final[tuple[int, int]] = (1, 0)
"""(major, minor). A minor release only adds; a major release may remove or change."""

ENTRY_POINT_GROUP: Final = "leadframe"
"""The entry-point group of plugins; an entry point's name is its `--device` value."""

KERNEL_GROUP: Final = "leadframe.kernels"
"""The entry-point group of plugins that offer kernels for a platform, which may be someone
else's; an entry point's name is that platform's `--device` value. A separate group, so that
naming a device imports its plugin and those that extend it, and no other.
"""

MODEL_IMPL_GROUP: Final = "leadframe.model_impl"
"""The entry-point group of model implementations; an entry point's name is its `--model-impl`
value.
"""
