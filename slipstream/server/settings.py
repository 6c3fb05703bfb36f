"""What the person who runs the server may set; the command line makes an option of every field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerSettings:
    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for every one of this machine.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    api_key: str | None = _option(None, "Key that clients must send as a bearer token.")
    served_model_name: str | None = _option(None, "Name of the model for clients; what was asked for if unset.")
    max_queue: int = _option(1024, "Requests that may wait beyond those that run; more are refused with 429.")
    max_body_bytes: int = _option(4 << 20, "Largest request body, in bytes; larger ones are refused with 413.")
    body_timeout_s: float = _option(20.0, "Longest pause while a request's body arrives, in seconds.")
    shutdown_timeout_s: float = _option(30.0, "How long a shutdown waits for requests to finish, in seconds.")
    log_requests: bool = _option(True, "Write one line of JSON for every request to standard error.")
