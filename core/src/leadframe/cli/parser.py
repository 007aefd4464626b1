"""An argument parser for people: short errors, close matches, defaults in the help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from leadframe.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\Z")
_LARGEST = 2**63
_COUNTS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
_BYTES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1024, "m": 1000**2, "mb": 1000**2, "mib": 1024**2,
    "g": 1000**3, "gb": 1000**3, "gib": 1024**3, "t": 1000**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip


_REFUSED = {"--trust-remote-code": "; code that comes with a model is never run"}
"""Options that people bring from elsewhere and that will not come: why."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `ConfigError`s of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing a usage that fills the screen."""
        raise ConfigError(f"{message}\n{self.prog} --help lists what there is")

    def option(self, flag: str) -> argparse.Action:
        """Returns what a flag does.

        Raises:
          ConfigError: there is none of that name; with the closest one.
        """
        action = self._option_string_actions.get(flag)
        if action is None:
            self.error(f"unknown option {flag!r}{self._hint(flag)}")
        return action

    def _hint(self, name: str) -> str:
        from leadframe.platform.names import did_you_mean

        return _REFUSED.get(name) or did_you_mean(name, self._option_string_actions)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses arguments.

        Raises:
          ConfigError: one is unknown, with the closest known one, or has a bad value.
        """
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            flags = [item.split("=", 1)[0] for item in unknown if item.startswith("-")]
            name = (flags or unknown)[0]
            kind = "option" if flags else "argument"
            self.error(f"unknown {kind} {name!r}{self._hint(name)}")
        return args


class _Formatter(argparse.HelpFormatter):
    """Shows defaults that say something, and `--[no-]flag` once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, argparse.SUPPRESS, False, (), [])
        default = "on" if action.default is True else "%(default)s"
        return f"{text} (default: {default})" if shown and action.option_strings else text


def field_help(config: type) -> dict[str, str]:
    """Reads the help of each field from the `Attributes:` section of a class's docstring."""
    lines = inspect.cleandoc(config.__doc__ or "").splitlines()
    if "Attributes:" not in lines:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in lines[lines.index("Attributes:") + 1 :]:
        start = re.match(r"  (\w+): (.*)", line)
        if start:
            name, found[start[1]] = start[1], start[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return {key: text.replace("%", "%%") for key, text in found.items()}


def add_field(
    parser: argparse._ActionsContainer,
    config: type,
    name: str,
    *flags: str,
    **options: Any,
) -> None:
    """Adds the flag of a config field; its docstring is the help, its default the default.

    Args:
      parser: a parser or a group of one.
      config: the dataclass.
      name: the field.
      *flags: the flags; none takes `--the-field`.
      **options: what `add_argument` takes besides.
    """
    field = {f.name: f for f in dataclasses.fields(config)}[name]
    has_default = field.default is not dataclasses.MISSING
    options.setdefault("default", field.default if has_default else None)
    if isinstance(field.default, bool):
        options.setdefault("action", argparse.BooleanOptionalAction)
    elif isinstance(field.default, int | float):
        options.setdefault("type", type(field.default))
    flags = flags or ("--" + name.replace("_", "-"),)
    if flags[0].startswith("-"):
        options["dest"] = name
    parser.add_argument(*flags, help=field_help(config)[name], **options)


def token_count(text: str) -> int:
    """Reads a number of tokens: 4096, 4k = 4,000, 4K = 4,096."""
    return _scaled(text, _COUNTS, lambda unit: unit, "a number such as 4096, 4k or 4K")


def byte_size(text: str) -> int:
    """Reads a number of bytes: 1048576, 512MiB, 2GiB, 1.5gb."""
    return _scaled(text, _BYTES, str.lower, "a size such as 512MiB, 2GiB or 1.5GB")


def _scaled(text: str, units: dict[str, int], fold: Callable[[str], str], expected: str) -> int:
    match = _SIZE.match(text.strip())
    unit = units.get(fold(match[2])) if match else None
    if match is None or unit is None or float(match[1]) * unit >= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not {expected}")
    return int(float(match[1]) * unit)


def key_value(text: str) -> tuple[str, str]:
    """Reads KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def op_names(text: str) -> tuple[str, tuple[str, ...]]:
    """Reads OP=NAME,NAME."""
    op, names = key_value(text)
    return op, tuple(name.strip() for name in names.split(",") if name.strip())
