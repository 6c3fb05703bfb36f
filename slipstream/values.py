"""Strict checks of callers' values: a plain value within its bounds, or an error of one line."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.errors import RequestError

MAX_INT32 = 2**31 - 1  # the range of a field of a request row


class Bounds(NamedTuple):
    """The valid numbers of a field; ``None`` selects the field's default."""

    low: float
    high: float
    is_integer: bool = False
    is_low_open: bool = False
    may_be_none: bool = True

    def read(self, name: str, value: Any) -> Any:
        return read_number(name, value, self)


def read_number(name: str, value: Any, bounds: Bounds) -> Any:
    """The value as a plain ``int`` or ``float`` within its bounds; anything else is refused by name."""
    if value is None and bounds.may_be_none:
        return None
    if _is_number(value, bounds.is_integer):
        number: Any = value
        # Compared so that NaN, which compares false with everything, is refused.
        is_above = number > bounds.low if bounds.is_low_open else number >= bounds.low
        if is_above and number <= bounds.high:
            return _as_int(number, bounds) if bounds.is_integer else float(number)
    limit = f"{'above' if bounds.is_low_open else 'of at least'} {_plain(bounds.low)}"
    limit += f" and at most {_plain(bounds.high)}" if bounds.high < math.inf else ""
    raise RequestError(
        f"{name} must be {'an integer' if bounds.is_integer else 'a number'} {limit}, not {describe_value(value)}"
    )


def _is_number(value: Any, is_integer: bool) -> bool:
    kind = type(value)
    if kind is int or (kind is float and not is_integer):  # the common case; the general check takes a microsecond
        return True
    return isinstance(value, numbers.Integral if is_integer else numbers.Real) and kind is not bool


def _as_int(value: Any, bounds: Bounds) -> int:
    # A count without an upper bound is clamped to what a row can hold.
    return int(value) if bounds.high < math.inf else min(int(value), MAX_INT32)


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def describe_value(value: Any) -> str:
    """A value for a message of one line, shortened: callers may send values of any size."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits, and objects with a faulty repr
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_sequence(name: str, value: Any, kind: str, limit: int) -> Sequence[Any]:
    if (
        isinstance(value, Mapping | bytes | bytearray)
        or not hasattr(value, "__iter__")
        or not hasattr(value, "__len__")
    ):
        raise RequestError(f"{name} must be a list of {kind}, not {describe_value(value)}")
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries; at most {limit} are supported")
    return tuple(value)


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"{name} holds {describe_value(bad)}, which is not a token id below {vocab_size}")


def is_valid_text(text: str) -> bool:
    """Whether every character can be encoded: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
