"""What a request may ask its text to be: plain data, checked before anything runs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from slipstream import RequestError, SamplingParams, StructuredOutput


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
    given = StructuredOutput(json=schema)
    assert given.json is not None and list(json.loads(given.json)["properties"]) == ["b", "a"]
    assert given == StructuredOutput(json=given.json) and given.kind == "json"
    assert json.loads(StructuredOutput(json=True).json or "") == {"type": "object"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "exactly one of json, regex, choice and grammar, not none"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"jsn": {}}, "did you mean 'json'"),
        ({"json": "{"}, "is not JSON"),
        ({"json": [1]}, "must be a schema or true"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json": False}, "must be a schema or true"),
        ({"regex": ""}, "must be a text that is not empty"),
        ({"regex": "a" * (1 << 20 | 1)}, "at most 1048576"),
        ({"grammar": "\ud800"}, "valid Unicode"),
        ({"choice": "yes"}, "a list of texts"),
        ({"choice": []}, "is empty"),
        ({"choice": ["a", 3]}, "must be a text"),
        ({"json": {}, "disable_any_whitespace": 1}, "must be true or false"),
        ({"regex": "a", "disable_any_whitespace": True}, "for json alone"),
        ("json", "must be a StructuredOutput"),
    ],
)
def test_what_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        SamplingParams(structured=given)


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "string"}},
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a"'},
    ],
)
def test_it_travels_to_another_process(given: dict[str, Any]) -> None:
    params = SamplingParams(structured=StructuredOutput(**given))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params == SamplingParams(structured=given)
