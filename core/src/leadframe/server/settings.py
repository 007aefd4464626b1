"""Settings of the HTTP server. The docstring of each field is its `--help` text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leadframe.config import check_range, check_types
from leadframe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the engine is offered over HTTP.

    Attributes:
      host: Address to bind; "0.0.0.0" offers the server to the network.
      port: Port to bind; 0 takes a free one.
      api_keys: Key that clients must send as a bearer token; repeat it for several. Every route
        but /health and /health/ready then needs one. LEADFRAME_API_KEY is an alias that does not
        show in the list of processes.
      served_model_names: Name that the API shows for the model; repeat it for several. The
        default is the model's own.
      chat_template: File with a Jinja chat template that replaces the model's own.
      shutdown_timeout: Seconds that running requests may go on after SIGTERM before they are
        aborted.
      generation_config: "model" takes temperature, top_p and the like from the model's
        generation config where a request does not set them; "none" takes OpenAI's defaults.
      max_body_bytes: Largest request body; a larger one is refused with 413.
      accept_priority: requests may set `priority`; so when the scheduling policy reads it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    shutdown_timeout: float = 10.0
    generation_config: Literal["none", "model"] = "none"
    max_body_bytes: int = 4 << 20
    accept_priority: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range."""
        check_types(self)
        if not self.host:  # a socket would take every address
            raise ConfigError(
                "--host is empty; name an address, such as 127.0.0.1, or 0.0.0.0 for every one"
            )
        check_range("port", self.port, 0, 65535)
        check_range("shutdown_timeout", self.shutdown_timeout, 0, 86400)
        check_range("max_body_bytes", self.max_body_bytes, 1024, 2**40)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key must be printable ASCII without spaces, and not empty")
        for name in self.served_model_names:
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise ConfigError(
                    f"--served-model-name is {name[:64]!r}; it must be 1 to 256 printable "
                    "characters"
                )
