"""The sampling parameters of a request. Plain data: no torch, and nothing of how a step runs.

The fields that sampling operations read are generated here by ``make docs`` from the operations' declarations, so
that type checkers, editors and ``slipstream --help`` know them without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slipstream.errors import RequestError, nearest
from slipstream.parameters import (
    Check,
    Parameter,
    Switch,
    Texts,
    TokenIds,
    TokenNumbers,
    extra_parameters,
    parameter,
)
from slipstream.structured import Structure, StructuredOutput
from slipstream.values import Bounds, describe_value

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
# Limits on what is compared with every token of a request.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 4096

_LOGPROBS = Bounds(0, MAX_LOGPROBS, is_integer=True)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. ``None``: the value of the model's generation config, else the default."""

    # generated: parameters of sampling operations
    temperature: float | None = parameter(
        Bounds(0.0, 100.0),
        "Randomness: 0 always takes the likeliest token, 1 is the model's own distribution.",
        fallback=1.0,
    )
    top_k: int | None = parameter(
        Bounds(-1, math.inf, is_integer=True),
        "Draw from this many of the likeliest tokens; 0 is off.",
        fallback=0,
        minimum=0,
    )
    top_p: float | None = parameter(
        Bounds(0.0, 1.0, is_low_open=True),
        "Draw from the likeliest tokens that together have this probability; 1 is off.",
        fallback=1.0,
    )
    min_p: float | None = parameter(
        Bounds(0.0, 1.0),
        "Drop tokens less likely than this share of the likeliest one; 0 is off.",
        fallback=0.0,
    )
    presence_penalty: float = parameter(
        Bounds(-2.0, 2.0, may_be_none=False),
        "Subtracted from the logits of tokens already in the output.",
        default=0.0,
    )
    frequency_penalty: float = parameter(
        Bounds(-2.0, 2.0, may_be_none=False),
        "Subtracted for each time a token is already in the output.",
        default=0.0,
    )
    repetition_penalty: float | None = parameter(
        Bounds(0.0, 100.0, is_low_open=True),
        "Divides the logits of tokens in prompt and output, multiplies negative ones; 1 is off.",
        fallback=1.0,
    )
    logit_bias: Mapping[int, float] | None = parameter(
        TokenNumbers(300),
        'Added to logits, as JSON: {"token id": number}.',
    )
    bad_words: tuple[str, ...] = parameter(
        Texts(32, 1024),
        "Never generate this text; may be given several times.",
        default=(),
    )
    min_tokens: int = parameter(
        Bounds(0, math.inf, is_integer=True, may_be_none=False),
        "No end of sequence and no stop token before this many tokens.",
        default=0,
    )
    top_n_sigma: float = parameter(
        Bounds(0.0, 100.0, may_be_none=False),
        "Drop tokens whose logit is more than this many standard deviations below the largest; 0 is off.",
        default=0.0,
    )
    suppress_tokens: tuple[int, ...] = parameter(
        TokenIds(256),
        "Never generate this token id; may be given several times.",
        default=(),
    )
    begin_suppress_tokens: tuple[int, ...] = parameter(
        TokenIds(16),
        "Do not begin the output with this token id; may be given several times.",
        default=(),
    )
    timestamp_rules: tuple[int, ...] = parameter(
        TokenIds(4),
        "Token ids of a speech model whose transcripts have times: the first time, no times, end, last first time.",
        default=(),
    )
    # end
    max_tokens: int | None = parameter(Bounds(1, math.inf, is_integer=True), "Maximum number of tokens to generate.")
    n: int = parameter(
        Bounds(1, 128, is_integer=True, may_be_none=False), "Number of choices to generate for the prompt.", default=1
    )
    seed: int | None = parameter(
        Bounds(0, MAX_SEED, is_integer=True),
        "Seed of this request: the same seed gives the same text. Drawn at random if unset.",
    )
    stop: tuple[str, ...] = parameter(
        Texts(MAX_STOP_STRINGS, MAX_STOP_LENGTH), "Stop before this text; may be given several times.", default=()
    )
    stop_token_ids: tuple[int, ...] = parameter(
        TokenIds(MAX_STOP_TOKEN_IDS), "Stop after this token id; may be given several times.", default=()
    )
    include_stop_str_in_output: bool = parameter(Switch(), "Keep the stop string in the output.", default=False)
    ignore_eos: bool = parameter(Switch(), "Continue after the model's end-of-sequence token.", default=False)
    skip_special_tokens: bool = parameter(Switch(), "Leave special tokens out of the text.", default=True)
    logprobs: int | None = parameter(
        _LOGPROBS, "Log probability of each token, and of this many of the likeliest (at most 20)."
    )
    prompt_logprobs: int | None = parameter(_LOGPROBS, "The same for the prompt.")
    speculate: bool = parameter(
        Switch(),
        "Whether to speculate for this request, if the engine does.",
        default=True,
    )
    max_k: int | None = parameter(
        Bounds(0, math.inf, is_integer=True),
        "Maximum draft length for this request; the engine's if unset.",
    )
    structured: StructuredOutput | None = parameter(
        Structure(), "What the text must be: a `json` schema, or a `regex`, `choice` or `grammar`, as a JSON object."
    )
    # Values by name for registered sampling operations; only those that the request sets.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __new__(cls, *_given: object, **values: object) -> SamplingParams:
        """Refuse an unknown name with a hint of the nearest valid one."""
        for name in values:
            if name not in _FIELD_NAMES:
                if name in extra_parameters():
                    raise RequestError(f"{name} is no field of SamplingParams; give extra={{'{name}': ...}}")
                _refuse_unknown(name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field and convert it to a plain value, which can be sent to another process."""
        for name, check in _CHECKS:
            object.__setattr__(self, name, check.read(name, getattr(self, name)))
        object.__setattr__(self, "extra", _read_extra(self.extra))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From names and values as in JSON; parameters of registered operations are among the others."""
        extra = {name: value for name, value in values.items() if name in extra_parameters()}
        if not extra:
            return cls(**values)
        own = {name: value for name, value in values.items() if name not in extra}
        return cls(**{**own, "extra": {**own.get("extra", {}), **extra}})

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill unset parameters from the model's defaults, then from the engine's."""
        resolved = {
            name: PARAMETERS[name].resolve(getattr(self, name), getattr(defaults, name)) for name in MODEL_DEFAULTS
        }
        return self._copy(**resolved)

    def with_seed(self, seed: int) -> SamplingParams:
        return self._copy(seed=seed)

    def _copy(self, **changes: Any) -> SamplingParams:
        """A copy with changes that are known to be valid: nothing is checked again."""
        copy = object.__new__(SamplingParams)
        for name in _FIELD_NAMES:
            object.__setattr__(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy


_FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
# The parameters of the fields, by name.
PARAMETERS: Mapping[str, Parameter] = {
    f.name: replace(f.metadata["parameter"], name=f.name) for f in fields(SamplingParams) if "parameter" in f.metadata
}
# Parameters that default to the model's generation config.
MODEL_DEFAULTS = tuple(name for name, declared in PARAMETERS.items() if declared.fallback is not None)
_CHECKS: tuple[tuple[str, Check], ...] = tuple((name, declared.check) for name, declared in PARAMETERS.items())


def value_of(params: SamplingParams, declared: Parameter) -> Any:
    """A request's value of a parameter, from its field or from ``extra``."""
    if declared.name in PARAMETERS:
        return getattr(params, declared.name)
    return params.extra.get(declared.name, declared.resolve(declared.default, None))


def _read_extra(given: Any) -> dict[str, Any]:
    if given is None or given == {}:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(f"extra must map names of sampling parameters to values, not {describe_value(given)}")
    known = extra_parameters()
    for name in given:
        if name in PARAMETERS:
            raise RequestError(f"{name} is a field of SamplingParams; give it outside of extra")
        if name not in known:
            _refuse_unknown(name)
    return {name: known[name].check.read(name, value) for name, value in given.items() if value is not None}


def _refuse_unknown(name: Any) -> None:
    known = (*PARAMETERS, *extra_parameters())
    hint = nearest(name, known) if isinstance(name, str) else ""
    shown = f"'{name}'" if isinstance(name, str) and len(name) < 60 else describe_value(name)
    raise RequestError(f"unknown sampling parameter {shown}{hint}")
