"""The server under load: its address, the head of every request to it, and the models it lists."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slipstream.errors import ConfigError
from slipstream.load.events import error_message, shown

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. ``address`` is resolved once, so that no DNS lookup falls into a measurement."""

    family: int
    address: tuple[Any, ...]
    host: str  # for the Host field
    base: str  # the path before /chat/completions
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError as error:
            raise ConfigError(f"--url {url} is no address: {error}") from error
        if parts.scheme == "https":
            raise ConfigError(f"--url {url}: https is not supported; use the server's own port or a local proxy")
        if parts.scheme != "http" or not host:
            raise ConfigError(f"--url must be such as http://127.0.0.1:8000, not '{url}'")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII characters")
        if not (parts.path.isascii() and parts.path.isprintable() and " " not in parts.path):
            raise ConfigError(f"--url {url}: the path must be printable ASCII characters")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--url {url}: {error.strerror}") from error
        path = parts.path.rstrip("/")
        base = path if path.endswith("/v1") else f"{path}/v1"
        family, *_, address = _first_that_listens(found, url)
        return cls(family, address, parts.netloc.rpartition("@")[2], base, api_key)

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, judged by its address."""
        host = str(self.address[0])
        return host.startswith("127.") or host == "::1"

    def head(self, api: str) -> bytes:
        """The head of every request, up to the length of its body."""
        fields = [
            f"POST {self.base}{PATHS[api]} HTTP/1.1",
            f"Host: {self.host}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *self._authorization(),
            "Content-Length: ",
        ]
        return "\r\n".join(fields).encode()

    def first_model(self) -> str:
        """The first model that the server lists."""
        connection = http.client.HTTPConnection(self.address[0], self.address[1], timeout=_CHECK_TIMEOUT_S)
        fields = dict(line.split(": ", 1) for line in (f"Host: {self.host}", *self._authorization()))
        try:
            connection.request("GET", f"{self.base}/models", headers=fields)
            response = connection.getresponse()
            status, body = response.status, response.read(1 << 20)
        except (OSError, http.client.HTTPException) as error:
            text = shown(str(error).encode()) or type(error).__name__
            raise ConfigError(f"{self.host} does not list its models ({text}); name one with --model") from error
        finally:
            connection.close()
        try:
            listed = json.loads(body)
            if status == 200:
                return str(listed["data"][0]["id"])
            text = error_message(listed)
        except (ValueError, LookupError, TypeError, AttributeError):
            text = shown(body)
        raise ConfigError(f"{self.host} lists no models (HTTP {status}: {text}); name one with --model")

    def _authorization(self) -> list[str]:
        return [] if self.api_key is None else [f"Authorization: Bearer {self.api_key}"]


def _first_that_listens(found: list[Any], url: str) -> Any:
    """The first of a host's addresses that accepts connections; ``localhost`` has an IPv4 and an IPv6 one."""
    failure: OSError | None = None
    for entry in found:
        family, kind, protocol, _, address = entry
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(_CHECK_TIMEOUT_S)
                connection.connect(address)
            return entry
        except OSError as error:
            failure = error
    reason = failure and (failure.strerror or str(failure))
    raise ConfigError(f"no server answers at {url} ({reason}); start one with `slipstream serve`")
