"""The settings of the server; the command line has an option for every field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.config import option
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    api_key: str | None = option(None, "Key that clients must send as a bearer token.")
    served_model_name: str | None = option(None, "Model name in the API; the given model if unset.")
    max_queue: int = option(1024, "Requests that may wait beside those running; more are refused with 429.")
    max_body_bytes: int = option(4 << 20, "Largest request body, in bytes; larger ones are refused with 413.")
    max_upload_bytes: int = option(25 << 20, "Largest sound file, in bytes; larger ones are refused with 413.")
    max_connections: int | None = option(
        None, "Connections at a time; as many as the system's limit of open files allows if unset."
    )
    api_server_count: int | None = option(
        None, "Processes that speak HTTP, beside the engine's; one for every four cores, at most four, if unset."
    )
    header_timeout_s: float = option(10.0, "How long the headers of a request may take, in seconds.")
    keep_alive_s: float = option(75.0, "How long a connection without a request is kept, in seconds.")
    body_timeout_s: float = option(20.0, "Longest pause while a request's body arrives, in seconds.")
    step_timeout_s: float = option(
        300.0, "How long one step may take, in seconds; an engine that takes longer is restarted."
    )
    shutdown_timeout_s: float = option(30.0, "How long a shutdown waits for requests to finish, in seconds.")
    log_requests: bool = option(True, "Write one line of JSON for every request to standard error.")

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                option = f"--{name.replace('_', '-')}"
                limit = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
                raise ConfigError(f"{option} must be {limit}, not {value}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("--api-key must be printable ASCII characters, as it travels in a header")


_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_queue": (0, math.inf),
    "max_body_bytes": (1, math.inf),
    "max_upload_bytes": (1, math.inf),
    "max_connections": (1, math.inf),
    "api_server_count": (1, 64),
    "header_timeout_s": (0.1, math.inf),
    "keep_alive_s": (0.0, math.inf),
    "body_timeout_s": (0.1, math.inf),
    "step_timeout_s": (1.0, math.inf),
    "shutdown_timeout_s": (0.0, math.inf),
}
