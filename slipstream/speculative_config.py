"""How to speculate: what a user says, in vLLM's spelling or in short forms, checked before anything is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.errors import ConfigError, nearest

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
Method = Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
VERIFY_MODES = ("match", "rejection", "synthetic")
VerifyMode = Literal["match", "rejection", "synthetic"]
MAX_DRAFTS = 16
MAX_MATCH = 32
_USUAL_MATCH = 5
# What a draft length that adapts is chosen from. Each has graphs of its own, so they lie further apart as they grow.
_LENGTHS = (0, 1, 2, 3, 5, 7, 11, 16)
_INITIAL_LENGTH = 3
_MOST_DRAFTS: dict[Method, int] = {"ngram": 7, "draft_model": 5, "eagle": 7, "eagle3": 7, "mtp": 3}
_NGRAM_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
_KEYS = ("method", "model", "num_speculative_tokens", "adaptive", *_NGRAM_KEYS, "verify", "acceptance_rates")
_NGRAM_MODELS = ("ngram", "[ngram]")  # how vLLM's users spell it where a model is asked for
_SHORT_NAMES = {"method": "speculate", "num_speculative_tokens": "k", "model": "draft_model"}


@dataclass(frozen=True)
class SpeculativeConfig:
    method: Method
    num_drafts: int  # most tokens drafted ahead of a step
    # match: drafts that equal the target's own choice. rejection: speculative sampling, the same distribution but other
    # tokens than without drafts. synthetic: at random with given rates, for benchmarks; the text means nothing.
    verify: VerifyMode = "match"
    model: str | None = None  # of a draft model or a head: a folder, a .gguf file, a hub id or an alias
    # ngram: how many of the last tokens must, and at most may, have stood together before.
    min_match: int = 1
    max_match: int = _USUAL_MATCH
    # synthetic: entry i is the probability that the first i + 1 drafts are all accepted.
    acceptance_rates: tuple[float, ...] = ()
    # Whether the engine chooses how many to draft, from none to ``num_drafts``, by what they cost and how they fare.
    adaptive: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many drafts a step may have, fewest first."""
        if not self.adaptive:
            return (self.num_drafts,)
        return (*(k for k in _LENGTHS if k < self.num_drafts), self.num_drafts)

    @property
    def initial_length(self) -> int:
        return min(_INITIAL_LENGTH, self.num_drafts) if self.adaptive else self.num_drafts

    def lowered(self, num_drafts: int) -> SpeculativeConfig:
        """With at most so many drafts, where the number is the engine's to choose."""
        most = max(1, min(self.num_drafts, num_drafts))
        if not self.adaptive or most == self.num_drafts:
            return self
        return replace(self, num_drafts=most, acceptance_rates=self.acceptance_rates[:most])

    @property
    def takes_hidden_states(self) -> bool:
        """Whether drafts come from the target's own hidden states, each paired with the token behind it."""
        return self.method in ("eagle", "eagle3", "mtp")

    @property
    def foresees(self) -> bool:
        """Whether a draft that is not checked would have stood if it is the token that comes.

        Speculative sampling draws drafts with noise of their own: equal tokens are rarer than accepted ones.
        """
        return self.verify != "rejection" or self.method == "ngram"

    @property
    def depends_on_text_alone(self) -> bool:
        """Whether the host can tell from the tokens that came which drafts would have stood."""
        return self.method == "ngram" and not self.is_synthetic

    def num_made(self, num_checked: int) -> int:
        """By a step, where the next one checks so many.

        From the text alone they cost next to nothing to make: a step makes as many as there may be, or none. So a
        change of the number that is checked is no other kind of step.
        """
        makes_most = self.adaptive and self.depends_on_text_alone and num_checked > 0
        return self.num_drafts if makes_most else num_checked

    @property
    def is_synthetic(self) -> bool:
        """Whether text means nothing, which every output has to say."""
        return self.verify == "synthetic"


def read_speculative(
    given: Mapping[str, Any] | None, speculate: str | None, k: int | None, draft_model: str | None
) -> SpeculativeConfig | None:
    """From ``speculative_config`` or the short options; None without either."""
    short = {"method": speculate, "num_speculative_tokens": k, "model": draft_model}
    short = {key: value for key, value in short.items() if value is not None}
    if given is None:
        if short and "method" not in short:
            raise ConfigError(f"{_SHORT_NAMES[next(iter(short))]} says nothing without speculate: name a method")
        return None if short.get("method") in (None, "none") else _parse(short, _SHORT_NAMES)
    if short:
        raise ConfigError(f"{_SHORT_NAMES[next(iter(short))]} and speculative_config say the same; use one of them")
    if not isinstance(given, Mapping):
        raise ConfigError('speculative_config must be a JSON object such as {"method": "ngram"}')
    return _parse(given, {})


def _parse(given: Mapping[str, Any], names: Mapping[str, str]) -> SpeculativeConfig:
    """``names`` has what the user calls a key, where that is not the key."""
    for key in given:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r} in speculative_config{nearest(str(key), _KEYS)}")
    method = _method(given, names)
    model = _model(given, method)
    num_drafts = _integer(given, "num_speculative_tokens", _MOST_DRAFTS[method], MAX_DRAFTS, names)
    adaptive = given.get("adaptive")
    if adaptive is None:  # a number that somebody has chosen stays
        adaptive = given.get("num_speculative_tokens") is None
    elif not isinstance(adaptive, bool):
        raise ConfigError(f"adaptive must be true or false, not {adaptive!r}")
    if method != "ngram" and (found := [key for key in _NGRAM_KEYS if given.get(key) is not None]):
        raise ConfigError(f"{found[0]} belongs to ngram; leave it out with {method}")
    min_match = _integer(given, "prompt_lookup_min", 1, MAX_MATCH, names)
    max_match = _integer(given, "prompt_lookup_max", max(_USUAL_MATCH, min_match), MAX_MATCH, names)
    if min_match > max_match:
        raise ConfigError(f"prompt_lookup_min {min_match} is above prompt_lookup_max {max_match}; lower it")
    verify: Any = "match" if given.get("verify") is None else given["verify"]
    if verify not in VERIFY_MODES:
        raise ConfigError(f"verify must be one of {', '.join(VERIFY_MODES)}, not {verify!r}")
    rates = _rates(given.get("acceptance_rates"), verify, num_drafts)
    return SpeculativeConfig(method, num_drafts, verify, model, min_match, max_match, rates, adaptive)


def _method(given: Mapping[str, Any], names: Mapping[str, str]) -> Method:
    method, model = given.get("method"), given.get("model")
    if method is None and model is not None:  # as in vLLM, a model alone names a method
        method = "ngram" if model in _NGRAM_MODELS else "draft_model"
    if method in METHODS:
        return method  # type: ignore[no-any-return]  # just compared
    where = names.get("method", "speculative_config")
    if method is None:
        raise ConfigError(f"{where} names no method; known are {', '.join(METHODS)}")
    hint = nearest(str(method), METHODS) or f"; known are {', '.join(METHODS)}"
    raise ConfigError(f"unknown method {method!r} in {where}{hint}")


def _model(given: Mapping[str, Any], method: Method) -> str | None:
    model = given.get("model")
    if method in ("draft_model", "eagle", "eagle3"):
        if not (isinstance(model, str) and model):
            raise ConfigError(f"{method} needs a model: name one as draft_model, or as model in speculative_config")
        return model
    if method == "mtp" and model is not None:
        raise ConfigError(f"mtp drafts with layers of the target itself and takes no model; leave out {model!r}")
    if model is not None and model not in _NGRAM_MODELS:
        raise ConfigError(f"ngram drafts from a request's own tokens and takes no model; leave out {model!r}")
    return None


def _integer(given: Mapping[str, Any], key: str, default: int, largest: int, names: Mapping[str, str]) -> int:
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise ConfigError(f"{names.get(key, key)} must be an integer from 1 to {largest}, not {value!r}")
    return value


def _rates(given: Any, verify: str, num_drafts: int) -> tuple[float, ...]:
    if verify != "synthetic":
        if given is not None:
            raise ConfigError("acceptance_rates force what is accepted; they need verify 'synthetic'")
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
