"""`leadframe devices`: what is installed, in which state, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from leadframe.cli.parser import Parser
from leadframe.platform.listing import DeviceRow, format_devices, list_devices


def run(argv: Sequence[str]) -> int:
    """Lists the platforms; looks at devices without creating a context on them."""
    parser = Parser(prog="leadframe devices", description="List platforms and their devices.")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")
    parser.add_argument("-v", "--verbose", action="store_true", help="show -o options too")
    args = parser.parse(argv)
    rows = list_devices(os.environ)
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
        return 0
    print(format_devices(rows))
    if args.verbose:
        for row in rows:
            print("\n".join(_options(row)))
    return 0


def _options(row: DeviceRow) -> list[str]:
    """Returns the `-o KEY=VALUE` options of a platform, one a line."""
    options = row.plugin.options() if row.plugin is not None and row.error is None else ()
    lines = [f"\n{row.name}: options (-o KEY=VALUE)" if options else f"\n{row.name}: no options"]
    for option in options:
        choices = f" [{', '.join(map(str, option.choices))}]" if option.choices else ""
        lines.append(f"  {option.name}={option.default}{choices}  {option.help}")
    return lines
