"""What counts as a JSON body, and the one line for what does not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from slipstream.sampling.logit_bias import MAX_LOGIT_BIAS
from slipstream.server.protocol import MAX_DETOKENIZE, ChatCompletionRequest, CompletionRequest, DetokenizeRequest

from .scripted import ScriptedServer

BODY = b'{"prompt": "x", "max_tokens": 3}'
PATH = "/v1/completions"


@pytest.mark.parametrize(
    "kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/problem+json"]
)
def test_json_is_taken_whatever_it_is_called(scripted: ScriptedServer, kind: str | None) -> None:
    answer = scripted.ask("POST", PATH, content=BODY, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "application/xml", "json"])
def test_another_type_is_named_with_the_right_one(scripted: ScriptedServer, kind: str) -> None:
    answer = scripted.ask("POST", PATH, content=BODY, headers={"Content-Type": kind})
    assert answer.status_code == 415
    expected = f"the body must be JSON: send the header 'Content-Type: application/json', not '{kind}'"
    assert answer.json()["error"]["message"] == expected


def test_another_sites_page_may_not_leave_the_type_out(scripted: ScriptedServer) -> None:
    """A browser sends such a request without asking the server first."""
    answer = scripted.ask("POST", PATH, content=BODY, headers={"Origin": "http://elsewhere"})
    assert answer.status_code == 415
    assert not scripted.engine.requests


def test_a_body_without_a_type_that_is_not_json_says_so(scripted: ScriptedServer) -> None:
    answer = scripted.ask("POST", PATH, content=b"prompt=x")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is not valid JSON: Expecting value"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "x", "temperature": Infinity}', "Infinity is not a JSON number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": "x", "logit_bias": {"1": 1e999}}', "1e999 is too large a number"),
        (b'{"messages": [{"role": "user", "content": "x", "weight": NaN}]}', "NaN is not a JSON number"),
        (b'{"prompt": "\xff"}', "it is not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested too deeply"),
    ],
)
def test_what_python_takes_and_json_does_not_have(scripted: ScriptedServer, content: bytes, reason: str) -> None:
    path = "/v1/chat/completions" if b"messages" in content else PATH
    answer = scripted.ask("POST", path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"the body is not valid JSON: {reason}"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * 10_000}),
        (CompletionRequest, {"prompt": [[-1] * 10_000]}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(10_000)), "x")}),
        (CompletionRequest, {"prompt": "x", "bad_words": [""] * 10_000}),
        (CompletionRequest, {"prompt": "x", **dict.fromkeys(map(str, range(10_000)), 1)}),
        (ChatCompletionRequest, {"messages": [1] * 5_000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "tool_calls": [1] * 10_000}]}),
        (DetokenizeRequest, {"tokens": [-1] * 10_000}),
    ],
)
def test_a_body_with_many_faults_is_read_to_the_first(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """An error for each of a million ids needed 16 s and 4 GB, in which no other client was served."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= MAX_LOGIT_BIAS + 1


def test_ids_beyond_any_context_are_too_many() -> None:
    with pytest.raises(ValidationError, match="at most"):
        DetokenizeRequest(tokens=[1] * (MAX_DETOKENIZE + 1))
