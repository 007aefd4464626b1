"""Chips to compile for, opened from libtpu without having one.

`prepare_environment` must have run before this module is imported: it imports JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from leadframe.errors import ConfigError
from leadframe_tpu.compile_check.environment import DEFAULT_TARGETS


@dataclass(frozen=True, slots=True)
class Chip:
    """One device of a target.

    Attributes:
      kind: what the compiler calls it.
      hbm_bytes: its memory.
      bandwidth: bytes a second from that memory.
      flops: bfloat16 operations a second.
    """

    kind: str
    hbm_bytes: int
    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: such as "v5e:2x2".
      devices: JAX's descriptions of them; they hold nothing and run nothing.
      chip: what each is; None if programs are lowered only.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None

    @property
    def is_compiled(self) -> bool:
        """Whether programs are compiled, and not only lowered."""
        return self.chip is not None


def open_target(name: str) -> Target:
    """Describes a target.

    Args:
      name: generation and topology, such as "v5e:2x2".

    Raises:
      ConfigError: libtpu knows no such topology.
    """
    try:
        topology = topologies.get_topology_desc(topology_name=name, platform="tpu")
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        known = ", ".join(DEFAULT_TARGETS)
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--target is {name!r}, which libtpu does not know: {reason}; such as {known} exist"
        ) from error
    devices = tuple(topology.devices)
    with jax.set_mesh(Mesh(np.array(devices[:1]), ("chip",))):
        info = pltpu.get_tpu_info()
    chip = Chip(
        kind=str(getattr(devices[0], "device_kind", name)),
        hbm_bytes=info.hbm_capacity_bytes,
        bandwidth=float(info.mem_bw_bytes_per_second),
        flops=float(info.bf16_ops_per_second),
    )
    return Target(name, devices, chip)


def lowering_target(name: str = "any") -> Target:
    """The host in the place of a chip: programs are lowered for TPUs and not compiled.

    Args:
      name: the chip that was asked for.
    """
    return Target(f"{name} (lowered only)", tuple(jax.devices("cpu")), None)
