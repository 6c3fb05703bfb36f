"""Declarations of sampling parameters: name, default, valid values, and one line of help.

Plain data, read by the constructor of ``SamplingParams``, the command line, the HTTP server and the documentation. The
file of a sampling operation declares the parameters that it reads. Parameters of operations from outside the package
have no field in ``SamplingParams``; they are registered here, and their values are in ``extra``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from slipstream.errors import RequestError
from slipstream.values import MAX_INT32, Bounds, describe_value, is_valid_text, read_number, read_sequence

TOKEN_ID = Bounds(0, MAX_INT32, is_integer=True, may_be_none=False)
_BIAS = Bounds(-100.0, 100.0, may_be_none=False)


class Check(Protocol):
    """The valid values of a parameter."""

    def read(self, name: str, value: Any) -> Any:
        """The value as plain data that can be sent to another process; raises ``RequestError`` if it is invalid."""
        ...


class Switch(NamedTuple):
    def read(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, not {describe_value(value)}")
        return value


class Texts(NamedTuple):
    """One or several non-empty texts."""

    most: int
    max_length: int

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else read_sequence(name, value or (), "texts", self.most)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must be non-empty strings")
            if len(text) > self.max_length:
                raise RequestError(
                    f"{name} holds a text of {len(text)} characters; at most {self.max_length} are supported"
                )
            if not is_valid_text(text):
                raise RequestError(f"{name} must be texts of valid Unicode characters")
        return tuple(map(str, texts))


class TokenIds(NamedTuple):
    most: int

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        given = () if value is None else read_sequence(name, value, "token ids", self.most)
        return tuple(read_number(name, token_id, TOKEN_ID) for token_id in given)


class TokenNumbers(NamedTuple):
    """A number for each of some token ids, which are strings in JSON."""

    most: int

    def read(self, name: str, value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must map token ids to numbers")
        if len(value) > self.most:
            raise RequestError(f"{name} has {len(value)} entries; at most {self.most} are supported")
        found = {}
        for token_id, given in value.items():
            number: Any = token_id
            if isinstance(token_id, str):
                # Longer strings are no id, and Python refuses to parse the longest.
                number = int(token_id) if token_id.isascii() and token_id.isdigit() and len(token_id) <= 10 else None
                if number is None:
                    raise RequestError(f"{name} holds {describe_value(token_id)}, which is not a token id")
            found[read_number(f"token ids in {name}", number, TOKEN_ID)] = read_number(
                f"values in {name}", given, _BIAS
            )
        return found


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    check: Check
    help: str
    default: Any = None
    # Used if ``default`` is None and the model's generation config has no value; None: the parameter may stay None.
    fallback: float | None = None
    minimum: float | None = None  # lower resolved values, such as a top_k of -1, become this

    def resolve(self, value: Any, model_default: Any) -> Any:
        """The value for a request with ``value``, on a model whose generation config has ``model_default``."""
        if value is None:
            value = self.fallback if model_default is None else model_default
        return value if self.minimum is None else max(self.minimum, value)


def parameter(
    check: Check, text: str, default: Any = None, *, fallback: float | None = None, minimum: float | None = None
) -> Any:
    """A field of ``SamplingParams``; the parameter has the field's name."""
    declared = Parameter("", check, text, default, fallback, minimum)
    return field(default=default, metadata={"parameter": declared, "help": text})


_extra: dict[str, Parameter] = {}


def register_parameter(declared: Parameter) -> None:
    """Allow this parameter in ``extra`` of ``SamplingParams``."""
    if _extra.get(declared.name, declared) != declared:
        raise ValueError(f"two sampling parameters are called {declared.name}")
    _extra[declared.name] = declared


def extra_parameters() -> Mapping[str, Parameter]:
    """Parameters without a field in ``SamplingParams``, by name."""
    return _extra
