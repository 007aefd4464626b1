"""`leadframe new-backend NAME`: writes a package that passes the core tier as it is."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from leadframe.errors import ConfigError
from leadframe.platform import CONTRACT, FIRST_PARTY
from leadframe.platform.discovery import RESERVED_NAMES

_TEMPLATES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "plugin.py.in": "src/{package}/plugin.py",
    "backend.py.in": "src/{package}/backend.py",
    "test_conformance.py.in": "tests/test_conformance.py",
    "conformance.yml.in": ".github/workflows/conformance.yml",
}


def write_backend(name: str, folder: Path, distribution: str = "") -> list[Path]:
    """Writes the package of a new platform.

    Args:
      name: the `--device` value.
      folder: where it goes; must not exist, or be empty.
      distribution: what pip will call it; empty takes leadframe-NAME.

    Returns:
      The files.

    Raises:
      ConfigError: the name cannot be used, or the folder is not empty.
    """
    distribution = distribution or f"leadframe-{name}"
    package = re.sub(r"[-.]", "_", distribution)
    _check(name, package, folder)
    tokens = {
        "@NAME@": name,
        "@DISTRIBUTION@": distribution,
        "@PACKAGE@": package,
        "@CLASS@": "".join(part.capitalize() for part in re.split(r"[-_.]", name)),
        "@MAJOR@": str(CONTRACT[0]),
        "@MINOR@": str(CONTRACT[1]),
    }
    written = []
    for template, target in _TEMPLATES.items():
        path = folder / target.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_fill(template, tokens))
        written.append(path)
    init = folder / "src" / package / "__init__.py"
    init.write_text(f'"""The platform `{name}` for Leadframe."""\n')
    return [*written, init]


def _fill(template: str, tokens: dict[str, str]) -> str:
    text = (files("leadframe.conformance") / "skeleton" / template).read_text()
    for token, value in tokens.items():
        text = text.replace(token, value)
    return text


def _check(name: str, package: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or keyword.iskeyword(package):
        raise ConfigError(
            f"the name is {name!r}; it must be lower-case letters, digits, - and _, such as mychip"
        )
    if name in RESERVED_NAMES or name in FIRST_PARTY:
        raise ConfigError(f"the name {name!r} is taken; choose another")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name another folder with --output")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses arguments, writes the package, says what to do next.

    Args:
      argv: the arguments after `leadframe new-backend`.
    """
    parser = argparse.ArgumentParser(
        prog="leadframe new-backend", description="Writes the package of a new platform."
    )
    parser.add_argument("name", help="the --device value, such as mychip")
    parser.add_argument("--output", type=Path, help="folder; leadframe-NAME when not given")
    args = parser.parse_args(argv)
    folder = args.output or Path(f"leadframe-{args.name}")
    try:
        written = write_backend(args.name, folder)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for path in written:
        sys.stdout.write(f"wrote {path}\n")
    sys.stdout.write(
        f"\nnext: pip install -e '{folder}[test]' && leadframe conformance {args.name}\n"
    )
    return 0


__all__ = ["main", "write_backend"]
