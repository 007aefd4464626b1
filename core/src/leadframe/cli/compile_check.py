"""`leadframe compile-check PLATFORM …`: hands over to what the platform's distribution offers.

A distribution offers it by an entry point in the group `leadframe.compile_check` whose name is
the platform's and whose object is `main(argv) -> exit status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leadframe.cli.parser import Parser
from leadframe.errors import ConfigError
from leadframe.platform.discovery import find_entry_point, installed_entry_points
from leadframe.platform.first_party import install_hint
from leadframe.platform.names import did_you_mean

GROUP: Final = "leadframe.compile_check"


def run(argv: Sequence[str]) -> int:
    """Compiles a platform's kernels without its chip."""
    points = installed_entry_points(GROUP)
    names = [point.name for point in points]
    if not argv or argv[0].startswith("-"):
        _parser(names).parse(argv)
    name, rest = argv[0], list(argv[1:])
    point = find_entry_point(name, points)
    if point is None:
        hint = did_you_mean(name, names) or _how_to_get(name)
        offered = ", ".join(names) or "none"
        raise ConfigError(f"no compile check for platform {name!r} (installed: {offered}){hint}")
    try:
        main = point.load()
    except ImportError as error:
        raise ConfigError(f"the compile check of {point} could not be imported: {error}") from error
    status: int = main(rest)
    return status


def _how_to_get(name: str) -> str:
    if find_entry_point(name, installed_entry_points()) is not None:
        return f"; {name} is installed and compiles nothing ahead"
    return install_hint(name)


def _parser(names: Sequence[str]) -> Parser:
    parser = Parser(
        prog="leadframe compile-check",
        description="Compile a platform's kernels for chips that are not here. Further arguments "
        "are the platform's own: leadframe compile-check PLATFORM --help.",
    )
    parser.add_argument("platform", metavar="PLATFORM", help=f"one of {', '.join(names) or 'none'}")
    return parser
