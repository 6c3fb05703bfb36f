"""Fields of a model's configuration, read by type and range: a damaged file is one line that names file and key.

Nothing here knows what a field means. The caller says which values are valid; null counts as absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError
from slipstream.values import MAX_INT32, describe_value

_MAX_NUMBER = 1e30  # far beyond every setting, and its square is still a float


class Fields(dict[str, Any]):
    """The content of a JSON or GGUF file, with typed readers."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", prefix: str = "") -> None:
        """``source`` is the file in messages; ``prefix`` is the path of the fields in it, such as ``rope_scaling.``."""
        super().__init__(values)
        self.source, self.prefix = source, prefix

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> Fields:
        """The fields themselves if they know their file, else new ones with ``source``."""
        return values if isinstance(values, Fields) else cls(values, source)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with values for absent keys; null stays null."""
        return Fields({**defaults, **self}, self.source, self.prefix)

    def changed(self, /, **values: Any) -> Fields:
        return Fields({**self, **values}, self.source, self.prefix)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT32) -> int:
        """An integer in a range. Without a default the key must be present, as in the other readers."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = -math.inf,
        low: float = -_MAX_NUMBER,
        high: float = _MAX_NUMBER,
    ) -> float:
        value = self._value(key, default)
        if not _is_number(value) or not (above < value and low <= value <= high):
            limit = f"above {above:g}" if above > -math.inf else f"from {low:g}"
            raise self.refuse(key, f"a number {limit} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Empty where there are none."""
        return self._list(key, "texts", {str})

    def integers(self, key: str, *, low: int = 0, high: int = MAX_INT32) -> list[int]:
        """Empty where there are none."""
        expected = f"integers from {low} to {high}"
        found: list[int] = self._list(key, expected, {int})
        if found and not (low <= min(found) and max(found) <= high):
            raise self.refuse(key, f"a list of {expected}")
        return found

    def numbers(self, key: str, *, above: float = -math.inf) -> list[float]:
        """Empty where there are none."""
        expected = f"numbers above {above:g}" if above > -math.inf else "numbers"
        found: list[float] = self._list(key, expected, {int, float})
        if not all(above < value <= _MAX_NUMBER for value in found):
            raise self.refuse(key, f"a list of {expected}")
        return [float(value) for value in found]

    def pairs(self, key: str) -> list[tuple[int, int]]:
        """Of integers from 0 on, each a list of two."""
        found = self._list(key, "a list of pairs of integers", {list})
        if any(len(pair) != 2 or any(type(number) is not int or number < 0 for number in pair) for pair in found):
            raise self.refuse(key, "a list of pairs of integers")
        return [(first, second) for first, second in found]

    def section(self, key: str) -> Fields:
        """The fields of a nested object; empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value, self.source, f"{self.prefix}{key}.")

    def refuse(self, key: str, needed: str) -> ModelError:
        """The error for an invalid value."""
        return ModelError(
            f"{self.source} has no valid '{self.prefix}{key}': {describe_value(self.get(key))} is not {needed}; "
            "is the file damaged?"
        )

    def _value(self, key: str, default: Any) -> Any:
        if (value := self.get(key)) is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source} has no valid '{self.prefix}{key}'; is the model folder complete?")
        return default

    def _list(self, key: str, expected: str, types: set[type]) -> list[Any]:
        value = self._value(key, [])
        if not isinstance(value, list | tuple) or not types.issuperset(map(type, value)):
            raise self.refuse(key, f"a list of {expected}")
        return list(value)


def _is_number(value: Any) -> bool:
    """Integers of any size are compared with a bound before they become a float, which would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path: Path) -> Fields:
    """The JSON object in a file that must exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); download the model again") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    except RecursionError as error:
        raise ModelError(f"{path} is not valid JSON (too deeply nested); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object; download it again")
    return Fields(content, str(path))


def read_json_if_present(path: Path) -> Fields:
    """The JSON object in a file, empty if there is no such file."""
    return read_json(path) if path.is_file() else Fields({}, str(path))
