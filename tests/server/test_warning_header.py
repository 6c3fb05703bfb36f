"""Requests that are served otherwise than asked say so in a header, beside what the server warns of anyway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.output import SYNTHETIC_WARNING
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedServer

WARNING = "X-Slipstream-Warning"
CHAT = {"messages": [{"role": "user", "content": "x"}]}  # 31 tokens: "<s>user: x</s><s>assistant: " with three special
LOWERED = "max_tokens was lowered from 500 to 60: the context holds 64 tokens, 4 are the prompt"


@pytest.fixture
def small(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tokenizer, [("a", 0, 0)], max_model_len=64)
    yield server
    server.close()


@pytest.mark.parametrize("stream", [False, True])
def test_fewer_tokens_than_asked_for(small: ScriptedServer, stream: bool) -> None:
    answer = small.post("/v1/completions", prompt="abcd", max_tokens=500, stream=stream)
    assert answer.status_code == 200
    assert answer.headers[WARNING] == LOWERED
    assert WARNING not in small.post("/v1/completions", prompt="abcd", max_tokens=60, stream=stream).headers


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_warns_only_of_what_was_asked_for(small: ScriptedServer, name: str) -> None:
    answer = small.post("/v1/chat/completions", **CHAT, **{name: 64})
    assert answer.headers[WARNING].startswith("max_tokens was lowered from 64 to ")
    assert WARNING not in small.post("/v1/chat/completions", **CHAT).headers


def test_several_prompts_are_one_line(small: ScriptedServer) -> None:
    answer = small.post("/v1/completions", prompt=["abcd", "x", "xyz"], max_tokens=500)
    assert answer.headers[WARNING] == f"{LOWERED}; the same holds for 2 more prompts"
    answer = small.post("/v1/completions", prompt=["x", "abcd"], max_tokens=62)
    assert answer.headers[WARNING].startswith("max_tokens was lowered from 62 to 60: ")


def test_it_comes_beside_the_warning_of_every_answer(tokenizer: Tokenizer) -> None:
    rates: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 1, "verify": "synthetic"}
    options = {"max_model_len": 64, "speculative_config": {**rates, "acceptance_rates": [0.5]}}
    server = ScriptedServer(tokenizer, [("a", 0, 0)], **options)
    answer = server.post("/v1/completions", prompt="abcd", max_tokens=500)
    assert answer.headers[WARNING] == f"{SYNTHETIC_WARNING}; {LOWERED}"
    assert server.post("/v1/completions", prompt="abcd", max_tokens=5).headers[WARNING] == SYNTHETIC_WARNING
    server.close()
