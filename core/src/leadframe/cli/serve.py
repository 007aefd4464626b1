"""`leadframe serve [MODEL]`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from leadframe.cli.engine_args import (
    add_engine_arguments,
    announce_device,
    engine_config,
    parse_with_config_file,
)
from leadframe.cli.parser import Parser, add_field, byte_size
from leadframe.config import EngineConfig
from leadframe.errors import ConfigError, RequestError
from leadframe.server.settings import ServerConfig

if TYPE_CHECKING:
    from leadframe.engine import AsyncEngine

_MAX_TEMPLATE_BYTES = 1 << 20


def run(argv: Sequence[str]) -> int:
    """Loads a model and serves it until told to stop.

    Returns:
      The exit status: 0 after a drained shutdown, the engine's error's when the engine died.

    Raises:
      SystemExit: SIGTERM came before the server answered; with status 143.
    """
    args = parse_with_config_file(_parser(), argv)
    config, settings = engine_config(args), _server_config(args)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    # Its infos about starting and stopping would read as errors, and we print our own.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    template = _read_template(settings.chat_template)
    _check_writable(args.startup_json)
    announce_device(config, sys.stdout)

    from leadframe.server.lifecycle import bind

    sock = bind(settings)
    try:
        with _ends_at_sigterm():
            return _serve(args, config, settings, template, sock)
    finally:
        sock.close()


@contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """Ends the start at SIGTERM as at Ctrl-C, so that it leaves no process and no file behind.

    Once the server runs it has a handler of its own, which drains.
    """

    def end(sent: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + sent)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    args: argparse.Namespace,
    config: EngineConfig,
    settings: ServerConfig,
    template: str | None,
    sock: socket.socket,
) -> int:
    from leadframe.cli.progress import progress_bar
    from leadframe.engine import AsyncEngine
    from leadframe.server.lifecycle import run as run_server
    from leadframe.server.services import Services

    with progress_bar("loading weights", is_bytes=True) as progress:
        engine = AsyncEngine.from_config(config, progress=progress)
    _print_start(engine)
    if args.startup_json:
        _write_json(args.startup_json, startup_report(engine))
    services = Services(engine, settings, template)
    host, port = sock.getsockname()[:2]
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    has_template = template is not None or engine.tokenizer.chat_template is not None

    def on_started() -> None:
        print(f"serving {services.model_names[0]} at {base} (Ctrl-C to stop); try:\n")
        print(f"  {curl_line(base, has_template, bool(settings.api_keys))}\n", flush=True)

    return run_server(services, sock, on_started)


def _print_start(engine: AsyncEngine) -> None:
    print(engine.ledger.table())
    print(engine.capacity_line, flush=True)


def startup_report(engine: AsyncEngine) -> dict[str, Any]:
    """Returns what `--startup-json` writes."""
    return {
        "model": engine.model_name,
        "device": engine.device_summary,
        "max_model_len": engine.max_model_len,
        "capacity": engine.capacity_line,
        **engine.ledger.to_json(),
    }


def curl_line(base: str, has_template: bool, has_key: bool) -> str:
    """Returns a command that works as it is printed; a key is never printed."""
    auth = '-H "Authorization: Bearer $LEADFRAME_API_KEY" ' if has_key else ""
    if has_template:
        path = "/v1/chat/completions"
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": 64,
            "temperature": 0,
        }
    else:
        path, body = "/v1/completions", {"prompt": "A lead frame is", "max_tokens": 32}
    return f"curl {base}{path} {auth}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _parser() -> Parser:
    parser = Parser(prog="leadframe serve", description="Serve a model over HTTP.")
    add_field(parser, EngineConfig, "model", "model", nargs="?", metavar="MODEL")
    add_engine_arguments(parser)
    http = parser.add_argument_group("HTTP")
    add_field(http, ServerConfig, "host")
    add_field(http, ServerConfig, "port")
    several: dict[str, Any] = {"action": "append", "default": []}
    add_field(http, ServerConfig, "api_keys", "--api-key", metavar="KEY", **several)
    add_field(
        http, ServerConfig, "served_model_names", "--served-model-name", metavar="NAME", **several
    )
    add_field(http, ServerConfig, "chat_template", metavar="FILE")
    add_field(http, ServerConfig, "generation_config", choices=("none", "model"))
    add_field(http, ServerConfig, "shutdown_timeout", metavar="SECONDS")
    add_field(http, ServerConfig, "max_body_bytes", type=byte_size, metavar="SIZE")
    parser.add_argument(
        "--startup-json", metavar="FILE", help="write the start-up ledger to a file"
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="least severe level that is logged",
    )  # fmt: skip
    return parser


def _server_config(args: argparse.Namespace) -> ServerConfig:
    keys = tuple(args.api_keys)
    from_env = os.environ.get("LEADFRAME_API_KEY")
    if not keys and from_env is not None:
        keys = (from_env,)
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=keys,
        served_model_names=tuple(args.served_model_names),
        chat_template=args.chat_template,
        shutdown_timeout=args.shutdown_timeout,
        generation_config=args.generation_config,
        max_body_bytes=args.max_body_bytes,
        accept_priority=args.policy == "priority",
    )


def _read_template(path: str | None) -> str | None:
    """Reads and compiles a chat template, so that a bad one stops the start and no request.

    Raises:
      ConfigError: it cannot be read or is not a template; names the line where there is one.
    """
    if path is None:
        return None
    # Here and not at the top: it imports the tokenizers library.
    from leadframe.tokenizer.chat_template import ChatTemplate

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from None
    if len(data) > _MAX_TEMPLATE_BYTES:
        raise ConfigError(f"--chat-template {path} is larger than {_MAX_TEMPLATE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        ChatTemplate(text, {})
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--chat-template {path} is not UTF-8 text: line {line} has the byte "
            f"0x{data[error.start]:02x}; save it as UTF-8"
        ) from None
    except RequestError as error:
        raise ConfigError(f"--chat-template {path}: {error}; mend the file") from None
    return text


def _check_writable(path: str | None) -> None:
    """Opens what `--startup-json` names, so that a mistake shows before minutes of loading.

    Raises:
      ConfigError: it cannot be written.
    """
    if path is None or Path(path).is_fifo():  # opening a pipe waits for its reader
        return
    file = Path(path)
    is_new = not file.exists()
    try:
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise _not_writable(path, error) from None


def _write_json(path: str, data: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from None


def _not_writable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"--startup-json {path} cannot be written: {error.strerror}; name a file in a folder that "
        "exists and that you may write to"
    )
