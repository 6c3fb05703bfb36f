"""The messages between the engine's process, its supervisor and its clients: msgpack over ZeroMQ.

A message is its kind and its content. All ends are of one version, so there is no negotiation.

    supervisor  -- Stop, Leave ------------------->  engine     socket engine-<generation>, bound by the engine
    client i    -- Add, Finish ------------------->  engine     the same
    engine      -- Ready, Refused, Pulse, Stats -->  supervisor socket watch-<generation>, bound by the supervisor
    engine      -- TokenUpdates, Stats, Pulse ---->  client i   socket client-<i>, bound by the client
    supervisor  -- EngineLost, EngineBack -------->  client i   the same
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.config import EngineConfig
from slipstream.engine.driver import Add, Finish, Stop
from slipstream.engine.stats import EngineStats
from slipstream.errors import RequestError
from slipstream.output import TokenUpdates
from slipstream.pooling import PoolingDefaults
from slipstream.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    config: EngineConfig
    defaults: SamplingParams
    eos_token_ids: tuple[int, ...]
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    model_path: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine could not be built, for a reason that the user can act on."""

    kind: str  # the name of the error's class
    message: str


@dataclass(frozen=True, slots=True)
class Stats:
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Pulse:
    """The engine's process is alive; sent every second, whatever its main thread does."""

    stuck_s: float  # since the main thread last made progress; 0 while it loads, which may take any time


@dataclass(frozen=True, slots=True)
class Leave:
    """A client is gone: its requests, whose ids begin with ``prefix``, have no reader any more."""

    prefix: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine's process has ended, and with it every request it had. Another one may follow."""

    generation: int
    reason: str
    num_sync_violations: int  # of this engine and those before it


@dataclass(frozen=True, slots=True)
class RestartFailed:
    """No other engine could be started yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineBack:
    """Another engine is ready for requests."""

    generation: int
    num_restarts: int
    ready: Ready


class MalformedRequest(Exception):  # noqa: N818  describes the message
    """A request that does not have the agreed format. It fails alone; the engine continues."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(reason)
        self.request_id = request_id


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Add,
        Finish,
        Stop,
        Leave,
        Ready,
        Refused,
        TokenUpdates,
        Stats,
        Pulse,
        EngineLost,
        RestartFailed,
        EngineBack,
    )
}
_NAMES = {kind: name.encode() for name, kind in _KINDS.items()}


def _pack(value: Any) -> Any:
    """An array as its shape, type and bytes."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, np.ascontiguousarray(value).data
    raise TypeError(f"messages hold no {type(value).__name__}")


def _unpack(kind: type, value: Any) -> Any:
    if issubclass(kind, np.ndarray):
        shape, dtype, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"messages hold no {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoders = {name.encode(): msgspec.msgpack.Decoder(kind, dec_hook=_unpack) for name, kind in _KINDS.items()}


def encode(message: Any) -> list[bytes]:
    """Two frames: kind and content."""
    return [_NAMES[type(message)], _encoder.encode(message)]


def decode(frames: list[bytes]) -> Any:
    name, content = frames
    try:
        return _decoders[name].decode(content)
    except (msgspec.ValidationError, RequestError) as error:
        if name != _NAMES[Add]:
            raise
        loose = msgspec.msgpack.decode(content)
        raise MalformedRequest(loose["request"]["request_id"], str(error)) from error


def engine_address(folder: Path | str, generation: int) -> str:
    return f"ipc://{folder}/engine-{generation}"


def watch_address(folder: Path | str, generation: int) -> str:
    return f"ipc://{folder}/watch-{generation}"


def client_address(folder: Path | str, client: int) -> str:
    return f"ipc://{folder}/client-{client}"


def client_prefix(client: int, incarnation: int) -> str:
    """The prefix of the ids of a client's requests. A client that is started again has a new one."""
    return f"{client}.{incarnation}:"


def client_of(request_id: str) -> int:
    """The client that receives a request's updates."""
    return int(request_id[: request_id.index(".")])
