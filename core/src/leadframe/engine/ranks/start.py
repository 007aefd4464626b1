"""Starts the other ranks of a group."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import tempfile
from pathlib import Path

from leadframe.config import EngineConfig
from leadframe.engine.ranks.backend import RankedBackend
from leadframe.engine.ranks.group import RankGroup
from leadframe.engine.ranks.wire import config_fields
from leadframe.platform.backend import Backend
from leadframe.platform.info import Limits
from leadframe.platform.selection import Selection


def rendezvous_path() -> str:
    """Returns where a group's private directory will be; nobody can guess the name before."""
    return str(Path(tempfile.gettempdir(), f"leadframe-{secrets.token_hex(16)}"))


def start_ranks(
    backend: Backend, config: EngineConfig, selection: Selection, limits: Limits
) -> RankedBackend:
    """Starts the other ranks, each with a backend of its own, and waits until they have one.

    Args:
      backend: rank 0's.
      config: the settings.
      selection: rank 0's device.
      limits: what rank 0's backend was created with.

    Raises:
      LeadframeError: what one of them met; the others have been ended.
    """
    os.mkdir(limits.rendezvous, 0o700)
    group = RankGroup(limits.tensor_parallel_size, limits.rendezvous)
    fields = {
        "config": config_fields(config),
        "device": _request(config, selection),
        "log_level": logging.getLogger().getEffectiveLevel(),
    }
    try:
        group.send_each(
            "create",
            lambda rank: (
                {**fields, "limits": dataclasses.asdict(dataclasses.replace(limits, rank=rank))},
                (),
            ),
        )
        group.collect()
    except BaseException:
        group.close()
        raise
    return RankedBackend(backend, group)


def _request(config: EngineConfig, selection: Selection) -> str:
    """What makes a worker choose the same device: some exist only under the name they got."""
    if selection.source == "auto":
        return selection.name
    return config.device.device or os.environ.get("LEADFRAME_DEVICE", selection.name)
