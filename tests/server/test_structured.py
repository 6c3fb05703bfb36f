"""Structured output over HTTP, by OpenAI's own client: parsed answers, schemas, streams, and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from .conftest import MODEL_NAME, RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
SETTINGS: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 1.0, "seed": 5, "max_tokens": 300}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    level: Literal[1, 2, 3]


FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": Verdict.model_json_schema()},
}


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_parse_gives_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(response_format=Verdict, **SETTINGS)
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_of_a_schema_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(response_format=FORMAT, **SETTINGS)
    text = whole.choices[0].message.content
    assert text is not None
    Verdict.model_validate_json(text)
    chunks = list(client.chat.completions.create(response_format=FORMAT, stream=True, **SETTINGS))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with client.chat.completions.stream(response_format=Verdict, **SETTINGS) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Verdict.model_validate_json(text)


def test_any_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **{**SETTINGS, "max_tokens": 60})
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "<" /[xy]{1,4}/ ">"'}, "<[xy]{1,4}>"),
        ({"json": {"enum": [1, 22]}}, "1|22"),
    ],
)
def test_the_fields_of_vllm(client: OpenAI, given: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": given}
    chat = client.chat.completions.create(extra_body=body, n=3, **SETTINGS)
    plain = client.completions.create(
        model=MODEL_NAME, prompt="abc", temperature=1.0, seed=5, max_tokens=50, extra_body=body
    )
    texts = [choice.message.content or "" for choice in chat.choices] + [plain.choices[0].text]
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_free_and_constrained_requests_beside_each_other(client: OpenAI, server: RunningServer) -> None:
    alone = client.chat.completions.create(**SETTINGS).choices[0].message.content
    stream = client.chat.completions.create(response_format=FORMAT, stream=True, **SETTINGS)
    next(stream)
    assert client.chat.completions.create(**SETTINGS).choices[0].message.content == alone
    stream.close()
    assert server.metric("masked_steps_total") > 0
