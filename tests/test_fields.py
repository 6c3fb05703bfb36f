"""Fields of a configuration: what is of another type or out of range is one line with the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json

Read = Callable[[Fields], Any]

ACCEPTED: list[tuple[Any, Read, Any]] = [
    (1, lambda fields: fields.integer("x"), 1),
    (8, lambda fields: fields.integer("x", high=8), 8),
    (None, lambda fields: fields.integer("x", 5), 5),
    (0, lambda fields: fields.integer("x", 5, low=0), 0),
    (3, lambda fields: fields.number("x"), 3.0),
    (0.5, lambda fields: fields.number("x", above=0.0, high=1.0), 0.5),
    (None, lambda fields: fields.number("x", 2.0), 2.0),
    (True, lambda fields: fields.flag("x"), True),
    (None, lambda fields: fields.flag("x", True), True),
    ("a", lambda fields: fields.text("x"), "a"),
    (None, lambda fields: fields.text("x", ""), ""),
    (["a", "b"], lambda fields: fields.texts("x"), ["a", "b"]),
    (None, lambda fields: fields.texts("x"), []),
    ([0, 7], lambda fields: fields.integers("x", high=7), [0, 7]),
    ([1, 2.5], lambda fields: fields.numbers("x", above=0.0), [1.0, 2.5]),
    ({"y": 1}, lambda fields: fields.section("x"), {"y": 1}),
    (None, lambda fields: fields.section("x"), {}),
]


@pytest.mark.parametrize(("value", "read", "expected"), ACCEPTED)
def test_values_that_fit(value: Any, read: Read, expected: Any) -> None:
    found = read(Fields({"x": value}))
    assert found == expected
    assert type(found) is type(expected) or isinstance(found, Fields)


REFUSED: list[tuple[Any, Read, str]] = [
    (0, lambda fields: fields.integer("x"), "0 is not an integer from 1 to 2147483647"),
    (9, lambda fields: fields.integer("x", high=8), "9 is not an integer from 1 to 8"),
    (1 << 70, lambda fields: fields.integer("x"), "1180591620717411303424 is not an integer"),
    (True, lambda fields: fields.integer("x"), "True is not an integer"),
    (1.0, lambda fields: fields.integer("x"), "1.0 is not an integer"),
    ("1", lambda fields: fields.integer("x"), "'1' is not an integer"),
    (math.nan, lambda fields: fields.number("x"), "nan is not a number"),
    (math.inf, lambda fields: fields.number("x"), "inf is not a number"),
    (10**400, lambda fields: fields.number("x"), "is not a number from -1e+30 to 1e+30"),
    (0.0, lambda fields: fields.number("x", above=0.0), "0.0 is not a number above 0"),
    (False, lambda fields: fields.number("x"), "False is not a number"),
    (1, lambda fields: fields.flag("x"), "1 is not true or false"),
    (["a"], lambda fields: fields.text("x"), "['a'] is not a text"),
    ("ab", lambda fields: fields.texts("x"), "'ab' is not a list of texts"),
    (["a", 1], lambda fields: fields.texts("x"), "['a', 1] is not a list of texts"),
    ([1, True], lambda fields: fields.integers("x"), "[1, True] is not a list of integers from 0 to"),
    ([8], lambda fields: fields.integers("x", high=7), "[8] is not a list of integers from 0 to 7"),
    ([1.0, math.nan], lambda fields: fields.numbers("x"), "[1.0, nan] is not a list of numbers"),
    ([-1.0], lambda fields: fields.numbers("x", above=0.0), "[-1.0] is not a list of numbers above 0"),
    (True, lambda fields: fields.section("x"), "True is not an object"),
]


@pytest.mark.parametrize(("value", "read", "reason"), REFUSED)
def test_values_that_do_not_fit(value: Any, read: Read, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(Fields({"x": value}, "/models/a/config.json", "rope_scaling."))
    assert str(caught.value).startswith("/models/a/config.json has no valid 'rope_scaling.x': ")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("values", [{}, {"x": None}])
def test_what_is_missing(values: dict[str, Any]) -> None:
    reads: tuple[Read, ...] = (lambda f: f.integer("x"), lambda f: f.number("x"), lambda f: f.text("x"))
    for read in reads:
        with pytest.raises(ModelError, match=r"config.json has no valid 'x'; is the model folder complete\?"):
            read(Fields(values))


def test_the_file_stays_known(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"inner": {"x": -1}, "size": 2, "none": None}))
    fields = read_json(path)
    assert Fields.from_dict(fields) is fields
    assert fields.with_defaults({"size": 1, "none": 3, "other": 4}) == {**fields, "other": 4}
    changed = fields.with_defaults({}).changed(size=5, self=6)
    assert (changed["size"], changed["self"], fields["size"]) == (5, 6, 2)
    with pytest.raises(ModelError, match=f"{path} has no valid 'inner.x': -1"):
        changed.section("inner").integer("x")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' * 100_000])
def test_json_in_json_without_end_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_json(path)
