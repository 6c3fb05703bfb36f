"""Which choice is whose, in whole answers and in streams; and events made of bytes are those the schema describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.output import Completion
from slipstream.request import Request
from slipstream.server.answers import Answer, ChatAnswer, CompletionAnswer, as_event
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedServer, chunks_of

PROMPTS, N = ["a", "b", "c"], 2
EXPECTED = ["a0", "a1", "b0", "b1", "c0", "c1"]  # OpenAI's order: all choices of a prompt, then those of the next


@pytest.fixture
def echoing(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Each continuation is its prompt and its number."""

    def text(request: Request) -> str:
        return tokenizer.decode(request.prompt_token_ids) + str(request.choice)

    server = ScriptedServer(tokenizer, [(text, 0, 0)])
    yield server
    server.close()


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_by_prompt_then_choice(echoing: ScriptedServer, stream: bool) -> None:
    answer = echoing.post("/v1/completions", prompt=PROMPTS, n=N, stream=stream)
    found: dict[int, str] = {}
    for chunk in chunks_of(answer) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == dict(enumerate(EXPECTED))


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_token_s_event_is_what_the_schema_would_write(kind: type[Answer], text: str) -> None:

    made = kind("id-\N{SNOWMAN}", 'a "model"', fingerprint="f", created=5)
    plain: Any = Completion(3, text, [1])
    event, by_schema = made.event(3, plain, text), as_event(made.chunk(3, plain, text, None))
    assert json.loads(event.removeprefix(b"data: ")) == json.loads(by_schema.removeprefix(b"data: "))
    assert event.endswith(b"\n\n") and event.count(b"\n") == 2, "a line break in the text would end the event"
