"""What the text of a request must look like: plain data, checked, without knowing how it is enforced.

A JSON schema, a regular expression, a list of choices or a grammar. Each is kept as text, so that equal ones compare
equal, and so that it can be sent to another process.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from slipstream.errors import RequestError, nearest
from slipstream.values import describe_value, is_valid_text, read_sequence

MAX_STRUCTURE_LENGTH = 1 << 20  # characters of a schema, a regular expression or a grammar
MAX_CHOICES = 4096
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Exactly one of the first four. ``json``: a schema as a mapping or as text, or True for any JSON object."""

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # in the variant of Lark that llguidance reads
    disable_any_whitespace: bool = False  # of ``json``: nothing between the parts of a document

    def __init__(
        self,
        json: Mapping[str, Any] | str | bool | None = None,
        regex: str | None = None,
        choice: Any = None,
        grammar: str | None = None,
        disable_any_whitespace: bool = False,
    ) -> None:
        given = {"json": json, "regex": regex, "choice": choice, "grammar": grammar}
        if len(named := [name for name, value in given.items() if value is not None]) != 1:
            found = " and ".join(named) or "none"
            raise RequestError(f"structured needs exactly one of json, regex, choice and grammar, not {found}")
        object.__setattr__(self, "json", None if json is None else _read_schema(json))
        object.__setattr__(self, "regex", None if regex is None else _read_text("regex", regex))
        object.__setattr__(self, "choice", None if choice is None else _read_choices(choice))
        object.__setattr__(self, "grammar", None if grammar is None else _read_text("grammar", grammar))
        if not isinstance(disable_any_whitespace, bool):
            given_value = describe_value(disable_any_whitespace)
            raise RequestError(f"structured.disable_any_whitespace must be true or false, not {given_value}")
        if disable_any_whitespace and json is None:
            raise RequestError("structured.disable_any_whitespace is for json alone; leave it out")
        object.__setattr__(self, "disable_any_whitespace", disable_any_whitespace)

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)


class Structure(NamedTuple):
    """The check of the parameter ``structured``: a ``StructuredOutput``, or a mapping of its fields."""

    def read(self, name: str, value: Any) -> StructuredOutput | None:
        if value is None or isinstance(value, StructuredOutput):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be a StructuredOutput, not {describe_value(value)}")
        known = [f.name for f in fields(StructuredOutput)]
        for key in value:
            if key not in known:
                hint = nearest(key, known) if isinstance(key, str) else ""
                raise RequestError(f"{name} has no field {describe_value(key)}{hint}")
        return StructuredOutput(**value)


def _read_schema(schema: Any) -> str:
    if schema is True:
        return _ANY_OBJECT
    if isinstance(schema, str):
        text = _read_text("json", schema)
        try:
            schema = json_format.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured.json is not JSON ({error}); give a schema") from None
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured.json must be a schema or true, not {describe_value(schema)}")
    try:
        # The order of properties has a meaning: they are generated in it.
        return _read_text("json", json_format.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured.json cannot be written as JSON: {error}") from None


def _read_choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str):
        raise RequestError("structured.choice must be a list of texts, not a text")
    found = tuple(
        _read_text("choice", text) for text in read_sequence("structured.choice", choices, "texts", MAX_CHOICES)
    )
    if not found:
        raise RequestError("structured.choice is empty; give at least one text")
    return found


def _read_text(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"structured.{name} must be a text that is not empty, not {describe_value(text)}")
    if len(text) > MAX_STRUCTURE_LENGTH:
        raise RequestError(
            f"structured.{name} has {len(text)} characters; at most {MAX_STRUCTURE_LENGTH} are supported"
        )
    if not is_valid_text(text):
        raise RequestError(f"structured.{name} must be a text of valid Unicode characters")
    return str(text)
