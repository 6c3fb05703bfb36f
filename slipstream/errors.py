"""The errors that users see. Each message is one line and says what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Root of every error Slipstream raises on purpose; the command line prints it as one line and exits with 2."""


class ConfigError(SlipstreamError):
    """An option is unknown, out of range, or does not fit the model or the machine."""


class ModelError(SlipstreamError):
    """A model cannot be found, fetched, verified or read."""


class RequestError(SlipstreamError):
    """One request cannot be served; other requests go on."""


class EngineError(SlipstreamError):
    """The engine itself failed; every request in flight fails with it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'top_k'?``, empty when nothing is close."""
    # Dashes before an option say nothing about which one was meant.
    by_letters = {option.lstrip("-"): option for option in valid}
    matches = difflib.get_close_matches(name.lstrip("-"), list(by_letters), n=1, cutoff=0.5)
    return f"; did you mean '{by_letters[matches[0]]}'?" if matches else ""
