"""``slipstream serve``: a model with an OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoints.hub import with_shipped_head
from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.server.settings import ServerSettings


def run(model: str | None, engine: EngineOptions, settings: ServerSettings) -> int:
    try:
        from slipstream.server.run import serve
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with: pip install 'slipstream[server]'"
        ) from error
    named = engine if model is None else replace(engine, model=model)
    return serve(with_shipped_head(named, by_default=True), settings)
