"""What travels between the server's process and the engine's, and how: msgpack over ZeroMQ.

A message is its kind and its content. Both ends are ours and of one version, so there is no negotiation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.config import EngineConfig
from slipstream.engine.driver import Add, Finish, Stop
from slipstream.engine.stats import EngineStats
from slipstream.types import SamplingParams, TokenUpdates


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    config: EngineConfig
    defaults: SamplingParams
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine could not be built, for a reason the user can act on."""

    kind: str  # the name of the error's class
    message: str


@dataclass(frozen=True, slots=True)
class Stats:
    stats: EngineStats


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Add, Finish, Stop, Ready, Refused, TokenUpdates, Stats)}
_encoder = msgspec.msgpack.Encoder()
_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}


def encode(message: Any) -> list[bytes]:
    """Two frames: kind and content."""
    return [type(message).__name__.encode(), _encoder.encode(message)]


def decode(frames: list[bytes]) -> Any:
    kind, content = frames
    return _decoders[kind.decode()].decode(content)
