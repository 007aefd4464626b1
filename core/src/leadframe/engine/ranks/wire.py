"""What travels between rank 0 and a worker, as JSON values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from leadframe import errors
from leadframe.channel import Arrays, Channel, Message
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import InternalError, LeadframeError
from leadframe.platform.backend import KVLayerSpec, KVSpec

__all__ = [
    "Arrays",
    "Channel",
    "Message",
    "config_fields",
    "error_fields",
    "read_config",
    "read_error",
    "read_kv_spec",
]


def config_fields(config: EngineConfig) -> dict[str, Any]:
    """Turns settings into JSON values."""
    fields = dataclasses.asdict(config)
    fields["device"] |= {
        "options": dict(config.device.options),
        "op_order": {op: list(names) for op, names in config.device.op_order.items()},
    }
    return fields


def read_config(fields: Mapping[str, Any]) -> EngineConfig:
    """Turns them back."""
    rest = dict(fields)
    device = dict(rest.pop("device"))
    device["op_order"] = {op: tuple(names) for op, names in device["op_order"].items()}
    return EngineConfig(
        scheduler=SchedulerConfig(**rest.pop("scheduler")),
        cache=CacheConfig(**rest.pop("cache")),
        device=DeviceConfig(**device),
        **rest,
    )


def read_kv_spec(fields: Mapping[str, Any]) -> KVSpec:
    """Turns what `dataclasses.asdict` made of a `KVSpec` back."""
    layers = tuple(KVLayerSpec(**layer) for layer in fields["layers"])
    return KVSpec(layers, fields["block_size"], fields["dtype"])


def error_fields(error: BaseException) -> dict[str, Any]:
    """Turns an error into JSON values: its type, its text and its plain attributes."""
    if not isinstance(error, LeadframeError):
        error = InternalError(f"{type(error).__name__}: {error}")
    plain = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | None)}
    return {"type": type(error).__name__, "text": str(error), "attributes": plain}


def read_error(fields: Mapping[str, Any], who: str) -> LeadframeError:
    """Turns them back into an error of the same type, whose text begins with who met it."""
    found = getattr(errors, fields["type"], InternalError)
    kind = found if issubclass(found, LeadframeError) else InternalError
    error: LeadframeError = kind.__new__(kind)
    error.args = (f"{who}: {fields['text']}",)
    vars(error).update(fields["attributes"])
    return error
