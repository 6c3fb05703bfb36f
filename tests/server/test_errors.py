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
