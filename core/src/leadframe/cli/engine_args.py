"""The flags that every command with an engine takes, and the EngineConfig that they make."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
from collections.abc import Sequence
from typing import Any, TextIO

from leadframe.cli.parser import Parser, add_field, byte_size, key_value, op_names, token_count
from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from leadframe.errors import ConfigError, shown


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of EngineConfig and its parts, in groups."""
    model = parser.add_argument_group("model")
    add_field(model, EngineConfig, "dtype")
    add_field(model, EngineConfig, "max_model_len", type=token_count, metavar="TOKENS")
    add_field(model, EngineConfig, "model_impl", choices=("auto", "leadframe", "transformers"))
    add_field(model, EngineConfig, "seed", type=int)

    device = parser.add_argument_group("device")
    add_field(device, DeviceConfig, "device", metavar="NAME[:INDEX]")
    pairs: dict[str, Any] = {"action": "append", "default": []}
    add_field(device, DeviceConfig, "options", "-o", type=key_value, metavar="KEY=VALUE", **pairs)
    add_field(device, DeviceConfig, "op_order", "--op", type=op_names, metavar="OP=NAMES", **pairs)
    add_field(device, DeviceConfig, "op_fallback", choices=("device", "host"))
    add_field(
        device, DeviceConfig, "tensor_parallel_size", "--tensor-parallel-size", "-tp", metavar="N"
    )
    add_field(device, DeviceConfig, "enforce_eager", action="store_true")

    memory = parser.add_argument_group("memory")
    add_field(memory, CacheConfig, "gpu_memory_utilization", type=float, metavar="FRACTION")
    add_field(memory, CacheConfig, "kv_cache_memory_bytes", type=byte_size, metavar="SIZE")
    add_field(memory, CacheConfig, "block_size", type=int)
    add_field(memory, CacheConfig, "kv_cache_dtype")
    add_field(memory, CacheConfig, "enable_prefix_caching")

    scheduling = parser.add_argument_group("scheduling")
    add_field(scheduling, SchedulerConfig, "max_num_seqs", type=token_count)
    add_field(scheduling, SchedulerConfig, "max_num_batched_tokens", type=token_count)
    add_field(scheduling, SchedulerConfig, "enable_chunked_prefill")
    add_field(scheduling, SchedulerConfig, "long_prefill_token_threshold", type=token_count)
    add_field(
        scheduling, SchedulerConfig, "policy", "--scheduling-policy", choices=("fcfs", "priority")
    )
    add_field(scheduling, SchedulerConfig, "max_num_queued_reqs")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with any of these options, such as max-num-seqs = 64; the command line "
        "and LEADFRAME_DEVICE go before it",
    )


_SECTIONS: dict[str, type] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "device": DeviceConfig,
}


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that were parsed, by field name, as `leadframe.LLM` takes them."""
    names = {name for section in _SECTIONS.values() for name in _names(section)}
    names |= set(_names(EngineConfig)) - set(_SECTIONS)
    found = {name: value for name, value in vars(args).items() if name in names}
    return {**found, "options": dict(found["options"]), "op_order": dict(found["op_order"])}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Builds the configuration from parsed flags.

    Raises:
      ConfigError: values contradict each other.
    """
    settings = engine_settings(args)
    parts = {
        part: section(**{name: settings.pop(name) for name in _names(section) if name in settings})
        for part, section in _SECTIONS.items()
    }
    return EngineConfig(**settings, **parts)


def announce_device(config: EngineConfig, out: TextIO) -> None:
    """Says which device will be used, before the engine's libraries are imported.

    Raises:
      PlatformError: the device is not there; nothing was loaded.
    """
    from leadframe.platform.selection import select_device

    print(select_device(config.device.device, os.environ).note, file=out, flush=True)


def _names(config: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config))


def parse_with_config_file(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses arguments, with the options of `--config FILE` before them, which then win.

    Raises:
      ConfigError: the file cannot be read, or an option in it or in `argv` is wrong.
    """
    probe = Parser(prog=parser.prog, add_help=False)
    probe.add_argument("--config")
    path = probe.parse_known_args(list(argv))[0].config
    if path is None:
        return parser.parse(argv)
    settings = _read_toml(path)
    if os.environ.get("LEADFRAME_DEVICE"):
        settings.pop("device", None)
    flags: list[str] = []
    for key, value in settings.items():
        try:
            own = _as_flags(parser, key, value)
            parser.parse(own)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {key} = {_shown(value)}: {error}") from None
        flags += own
    return parser.parse([*flags, *argv])


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (RecursionError, ValueError) as error:  # TOML's own error and UTF-8's are ValueErrors
        raise ConfigError(f"--config {path} is not TOML: {error}") from None


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


def _as_flags(parser: Parser, key: str, value: object) -> list[str]:
    """Turns one entry of the file into the arguments that say the same."""
    flag = "--" + key.replace("_", "-") if len(key) > 1 else "-" + key
    action = parser.option(flag)
    if action.dest in ("help", "config"):
        raise ConfigError(f"{flag} cannot stand in a file; give it on the command line")
    is_list = isinstance(action.default, list)
    items = value if is_list and isinstance(value, list) else [value]
    rule, kinds = _expected(action)
    for item in items:
        if type(item) not in kinds:
            raise ConfigError(f"it must be {rule}{', or a list of them' if is_list else ''}")
    if action.nargs == 0:
        negative = "--no-" + flag.removeprefix("--")
        off = [negative] if negative in action.option_strings else []
        return [flag] if value else off
    return [f"{flag}={item}" if flag.startswith("--") else f"{flag}{item}" for item in items]


def _expected(action: argparse.Action) -> tuple[str, tuple[type, ...]]:
    """Returns the rule for an option's value in a file, and the types that keep it."""
    if action.nargs == 0:
        return "true or false", (bool,)
    if action.type in (token_count, byte_size):
        return "an integer, or a string with a unit", (int, str)
    if action.type is int:
        return "an integer", (int,)
    if action.type is float:
        return "a number", (int, float)
    return "a string", (str,)
