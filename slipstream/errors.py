"""The errors that users see. Each message is one line and says what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Base class of expected errors; the command line prints them as one line and exits with 2."""


class ConfigError(SlipstreamError):
    """An option is unknown, out of range, or does not fit the model or the machine."""


class ModelError(SlipstreamError):
    """A model cannot be found, downloaded, verified or read."""


class RequestError(SlipstreamError):
    """One request cannot be served; other requests continue."""


class EngineError(SlipstreamError):
    """The engine itself failed; every request in flight fails with it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'top_k'?``, empty when nothing is close."""
    # Leading dashes of an option do not count.
    by_letters = {option.lstrip("-"): option for option in valid}
    matches = difflib.get_close_matches(name.lstrip("-"), list(by_letters), n=1, cutoff=0.55)
    return f"; did you mean '{by_letters[matches[0]]}'?" if matches else ""
