"""Speculation as the registry would configure it, without going through a user's options."""

from __future__ import annotations

from typing import Any

from slipstream.speculate.registry import find_method
from slipstream.speculative_config import SpeculativeConfig


def speculation(
    name: str, num_drafts: int, *others: Any, settings: dict[str, Any] | None = None, **named: Any
) -> SpeculativeConfig:
    """With what the method says of itself; ``settings`` are those of its own keys that are not at their defaults."""
    method = find_method(name)
    own = method.read_settings(settings or {})
    return SpeculativeConfig(name, num_drafts, *others, settings=own, needs=method.needs, **named)
