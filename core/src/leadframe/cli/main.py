"""`leadframe COMMAND …`: finds the command, runs it, turns errors into exit statuses."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from leadframe import __version__
from leadframe.errors import ConfigError, LeadframeError

COMMANDS: Final = {
    "serve": "serve a model over HTTP, with OpenAI's routes",
    "generate": "complete prompts in the terminal",
    "devices": "list the installed platforms and their devices",
    "capacity": "compute what fits a device that need not be here",
    "bench": "measure throughput, latency, a server, start-up, the scheduler or the host",
    "conformance": "test a platform against the contract",
    "compile-check": "compile a platform's kernels for chips that are not here",
    "new-backend": "write the skeleton of a platform plugin",
    "version": "print the version",
}
"""Every command, in the order of `--help`. Each has a module of its name in this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
      The exit status: 0, 2 for a mistake in the command line, or the error's own.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except LeadframeError as error:
        print(f"leadframe: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe left, as `| head` does; Python must not complain while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"leadframe: {error}", file=sys.stderr)
        return 1


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name in ("-V", "--version"):
        name = "version"
    if name not in COMMANDS:
        from leadframe.platform.names import did_you_mean

        hint = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}{hint}")
    module = importlib.import_module(f"leadframe.cli.{name.replace('-', '_')}")
    status: int = module.run(rest)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"leadframe {__version__}: serve language models on any accelerator", ""]
    lines += ["usage: leadframe COMMAND [options]", ""]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "leadframe COMMAND --help shows the options of a command."])


if __name__ == "__main__":
    sys.exit(main())
