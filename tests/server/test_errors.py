"""Hints come from the fields of the object that was sent, and of no other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel

from slipstream.server.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest

from .scripted import ScriptedServer

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "hint"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "mesages": []}, "mesages", "messages"),
        ("/v1/completions", {"prompt": "x", "messages": MESSAGES}, "messages", None),
        ("/v1/completions", {"prompt": "x", "promt": "x"}, "promt", "prompt"),
        ("/detokenize", {"tokens": [1], "token": [1]}, "token", "tokens"),
        (
            "/v1/completions",
            {"prompt": "x", "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "include_usage",
        ),
        ("/v1/completions", {"prompt": "x", "stream_options": {"temperatur": 1}}, "stream_options.temperatur", None),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{**TOOL, "typ": "x"}]}, "tools.0.typ", "type"),
    ],
)
def test_a_hint_names_a_field_that_would_be_taken(
    scripted: ScriptedServer, path: str, body: dict[str, Any], field: str, hint: str | None
) -> None:
    error = scripted.post(path, **body).json()["error"]
    assert error["message"] == f"unknown field '{field}'" + (f"; did you mean '{hint}'?" if hint else "")
    assert error["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "kind", "field"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, ChatCompletionRequest, "prompt"),
        ("/v1/completions", {"prompt": "x"}, CompletionRequest, "max_completion_tokens"),
        ("/tokenize", {"prompt": "x"}, TokenizeRequest, "tokens"),
    ],
)
def test_a_field_of_another_route_is_not_its_own_hint(
    scripted: ScriptedServer, path: str, body: dict[str, Any], kind: type[BaseModel], field: str
) -> None:
    message = scripted.post(path, **body, **{field: [1]}).json()["error"]["message"]
    hinted = re.search(r"did you mean '(.*)'", message)
    assert hinted is None or hinted[1] in kind.model_fields


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt: it must not be empty"),
        ({"prompt": []}, "prompt: it must not be empty"),
        ({"prompt": 5}, "prompt: Input should be a valid string or a valid list"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ({"prompt": [-1]}, "prompt.0: Input should be greater than or equal to 0"),
        ({"prompt": [[1], [1, -1]]}, "prompt.1.1: Input should be greater than or equal to 0"),
        ({"prompt": [True]}, "prompt.0: Input should be a valid string or a valid integer or a valid list"),
        ({"prompt": "x", "stop": ["x"] * 17}, "stop: List should have at most 16 items, not 17"),
        ({"prompt": "x", "stop": ["x", ""]}, "stop.1: String should have at least 1 character"),
        ({"prompt": "x", "stop": 1}, "stop: Input should be a valid string or a valid list"),
        ({"messages": []}, "messages: it must not be empty"),
        ({"messages": ["x"]}, "messages.0: Input should be an object"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": 5}]},
            "messages.1.content: Input should be a valid string",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0: Input should be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text: Input should be a valid string",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_told_in_the_words_of_the_api(
    scripted: ScriptedServer, body: dict[str, Any], message: str
) -> None:
    """And not by the names of types in the server, of which a field may have several."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = scripted.post(path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == message.partition(":")[0].partition(".")[0]
