"""How much of the server one client, and all clients together, may use."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_RESERVED_DESCRIPTORS = 64  # for the engine's sockets, files and pipes
_FEWEST_CONNECTIONS = 16


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    max_body_bytes: int
    body_timeout_s: float  # longest pause while a body arrives
    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    write_timeout_s: float = 60.0  # without progress of a client that does not read
    linger_s: float = 2.0  # for the client to close a connection that was closed here
    longest_body: int = 4  # in multiples of body_timeout_s

    @property
    def max_buffered_bytes(self) -> int:
        """Of all bodies that arrive or wait to be read, except small ones."""
        return 64 * self.max_body_bytes


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as the system allows; returns how many connections fit."""
    if sys.platform == "win32":
        return 512
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # some systems have a lower hard limit of their own
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(_FEWEST_CONNECTIONS, soft - _RESERVED_DESCRIPTORS)
