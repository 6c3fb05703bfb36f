"""The fields of a request's body that sampling operations read, derived from their declarations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from slipstream.parameters import Check, Parameter, Switch, Texts, TokenIds, TokenNumbers, extra_parameters
from slipstream.sampling.registry import packaged
from slipstream.values import MAX_INT32, Bounds

Item = TypeVar("Item")
# Parsed up to the first invalid item: an error for each of a million items would take minutes and gigabytes.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
# By name: operations of the package. Parameters of other operations come in ``extra``.
DECLARED: dict[str, Parameter] = {p.name: p for operation in packaged() for p in operation.parameters}


def body_fields() -> dict[str, Any]:
    """As ``pydantic.create_model`` takes them. ``None`` is what a client leaves unset."""
    return {
        name: (_type(declared.check) | None, Field(declared.default, description=declared.help))
        for name, declared in DECLARED.items()
    }


def gather_extra(data: dict[str, Any]) -> dict[str, Any]:
    """The body with parameters of operations from outside the package in ``extra``; ``SamplingParams`` checks them."""
    if not (names := extra_parameters().keys() & data.keys()):
        return data
    extra = {name: data[name] for name in names}
    if isinstance(given := data.get("extra"), dict):
        extra = {**given, **extra}
    return {**{name: value for name, value in data.items() if name not in names}, "extra": extra}


def _cut_to(most: int) -> Callable[[Any], Any]:
    """One entry too many is enough to refuse an object, so the rest need not be parsed."""

    def cut(given: Any) -> Any:
        return dict(itertools.islice(given.items(), most)) if isinstance(given, dict) else given

    return cut


def _type(check: Check) -> Any:
    match check:
        case Bounds(low=low, high=high, is_integer=is_integer, is_low_open=is_low_open):
            most = (MAX_INT32 if is_integer else None) if high == math.inf else high
            limits = Field(gt=low, le=most) if is_low_open else Field(ge=low, le=most)
            return Annotated[int if is_integer else float, limits]
        case Texts(most=most):
            return Annotated[ListOf[Annotated[str, Field(min_length=1)]], Field(max_length=most)]
        case TokenIds(most=most):
            return Annotated[ListOf[TokenId], Field(max_length=most)]
        case TokenNumbers(most=most):
            return Annotated[dict[str, float], Field(max_length=most), BeforeValidator(_cut_to(most + 1))]
        case Switch():
            return bool
    return Any  # checked by ``SamplingParams``
