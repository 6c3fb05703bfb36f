"""Speculative options of the user, in vLLM's format or in short forms, checked before anything is loaded. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from slipstream.config import EngineOptions
from slipstream.errors import ConfigError, nearest
from slipstream.output import SYNTHETIC_WARNING
from slipstream.speculate.method import read_integer
from slipstream.speculate.registry import keys_by_method, method_names, read_method
from slipstream.speculative_config import VERIFY_MODES, SpeculativeConfig

_KEYS = ("method", "model", "num_speculative_tokens", "adaptive")
_LAST_KEYS = ("verify", "acceptance_rates")
# The short option for each key.
_SHORT_NAMES = {"method": "speculate", "num_speculative_tokens": "k", "model": "draft_model"}


def read_speculation(options: EngineOptions) -> SpeculativeConfig | None:
    """From ``speculative_config`` or the short options; None without either."""
    given = options.speculative_config
    short = {key: getattr(options, name) for key, name in _SHORT_NAMES.items()}
    short = {key: value for key, value in short.items() if value is not None}
    if given is None:
        if short and "method" not in short:
            raise ConfigError(f"{_SHORT_NAMES[next(iter(short))]} has no effect without speculate: name a method")
        return None if short.get("method") in (None, "none") else _parse(short, _SHORT_NAMES)
    if short:
        raise ConfigError(f"{_SHORT_NAMES[next(iter(short))]} and speculative_config conflict; use one of them")
    if not isinstance(given, Mapping):
        raise ConfigError(f'speculative_config must be a JSON object such as {{"method": "{method_names()[0]}"}}')
    return _parse(given, {})


def synthetic_warning(options: EngineOptions) -> str | None:
    """The warning that text will be meaningless, if acceptance is synthetic. Raises if the options are invalid."""
    speculative = read_speculation(options)
    return SYNTHETIC_WARNING if speculative is not None and speculative.is_synthetic else None


def fill_help(text: str) -> str:
    """An option's help with ``{methods}``, ``{a method}`` and ``{keys}`` filled in from the registry."""
    names = method_names()
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    return (
        text.replace("{methods}", listed).replace("{a method}", names[0]).replace("{keys}", ", ".join(keys_by_method()))
    )


def _parse(given: Mapping[str, Any], names: Mapping[str, str]) -> SpeculativeConfig:
    """``names`` has the option that the user set for a key, where that has another name."""
    owners = keys_by_method()
    known = (*_KEYS, *owners, *_LAST_KEYS)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in speculative_config{nearest(str(key), known)}")
    method = read_method(given, names.get("method", "speculative_config"))
    needs, model = method.needs, method.read_model(given.get("model"))
    num_drafts = read_integer(given, "num_speculative_tokens", needs.default_drafts, needs.max_drafts, names)
    adaptive = given.get("adaptive")
    if adaptive is None:  # a draft length that the user has set is fixed
        adaptive = given.get("num_speculative_tokens") is None
    elif not isinstance(adaptive, bool):
        raise ConfigError(f"adaptive must be true or false, not {adaptive!r}")
    for key, owner in owners.items():
        if key not in method.keys and given.get(key) is not None:
            raise ConfigError(f"{key} belongs to {owner}; leave it out with {method.name}")
    settings = method.read_settings(given)
    verify: Any = "match" if given.get("verify") is None else given["verify"]
    if verify not in VERIFY_MODES:
        raise ConfigError(f"verify must be one of {', '.join(VERIFY_MODES)}, not {verify!r}")
    rates = _read_rates(given.get("acceptance_rates"), verify, num_drafts)
    return SpeculativeConfig(method.name, num_drafts, verify, model, rates, adaptive, settings, needs)


def _read_rates(given: Any, verify: str, num_drafts: int) -> tuple[float, ...]:
    if verify != "synthetic":
        if given is not None:
            raise ConfigError("acceptance_rates force acceptance; they need verify 'synthetic'")
        return ()
    numbers = list(given) if isinstance(given, list | tuple) else []
    right = all(isinstance(rate, int | float) and 0.0 <= rate <= 1.0 for rate in numbers)
    falling = right and all(a >= b for a, b in itertools.pairwise(numbers))
    if len(numbers) != num_drafts or not falling:
        raise ConfigError(
            f"verify 'synthetic' needs acceptance_rates: {num_drafts} numbers from 1 down to 0, entry i for the "
            f"probability that the first i + 1 drafts are all accepted, not {given!r}"
        )
    return tuple(float(rate) for rate in numbers)
