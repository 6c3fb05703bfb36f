"""Authorisation: the API key, where one is set."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from slipstream.server.errors import ApiError
from slipstream.server.http.exchange import HttpRequest

# Health checks, metrics and the documentation need no key.
_OPEN_PATHS = ("/health", "/metrics", "/version", "/docs", "/redoc", "/openapi.json")


def check_key(request: HttpRequest, api_key: bytes | None) -> None:
    if api_key is None or request.path.startswith(_OPEN_PATHS):
        return
    if not any(hmac.compare_digest(key, api_key) for key in _keys_in(request)):
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer ..., or X-API-Key: ...",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _keys_in(request: HttpRequest) -> Iterator[bytes]:
    for name, value in request.headers:
        scheme, _, key = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            yield key.strip()
        elif name == b"x-api-key":
            yield value
