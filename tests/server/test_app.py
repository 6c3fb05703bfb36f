"""Routes with an engine that says what a test wrote down."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from slipstream.request import Request

from .scripted import ScriptedServer, Step, chunks_of


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_single_stop_string_may_be_long(scripted: ScriptedServer, path: str) -> None:
    """The limit of 16 is how many there may be."""
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    long = "a stop string that is longer than sixteen characters"
    for stop in (long, [long], ["x"] * 16):
        answer = scripted.post(path, **asked, stop=stop)
        assert answer.status_code == 200, answer.text
    assert [request.params.stop for request in scripted.engine.requests] == [(long,), (long,), ("x",) * 16]
    refused = scripted.post(path, **asked, stop=["x"] * 17)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stop"


def test_ids_beyond_the_vocabulary_have_no_text(scripted: ScriptedServer) -> None:
    vocab_size = scripted.client.config.model.vocab_size
    assert vocab_size > scripted.client.tokenizer.vocab_size, "padding of the embedding, which a model may choose"
    assert scripted.post("/detokenize", tokens=[vocab_size - 1]).json() == {"prompt": ""}
    for bad in (vocab_size, 2**31 - 1):
        answer = scripted.post("/detokenize", tokens=[1, bad])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == f"tokens holds {bad}, which is not a token id below {vocab_size}"
        assert error["param"] == "tokens"


def test_a_tool_conversation_reaches_the_template(scripted: ScriptedServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    answer = scripted.post("/v1/chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    (request,) = scripted.engine.requests
    text = scripted.client.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert text == "<s>user: hi</s><s>assistant: </s><s>tool: 2</s><s>assistant: "


def test_choices_are_numbered_by_prompt_and_then_by_continuation(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In OpenAI's order, in whole answers and in streams; each answers with its prompt and its number."""

    def name_itself(request: Request) -> list[Step]:
        prompt = scripted.client.tokenizer.decode(request.prompt_token_ids)
        return [(prompt, 0, 0), (f"{request.choice}", 0, 0)]

    monkeypatch.setattr(scripted.engine, "steps_of", name_itself)
    asked = {"prompt": ["x", "yy", "z"], "n": 3}
    expected = ["x0", "x1", "x2", "yy0", "yy1", "yy2", "z0", "z1", "z2"]
    whole = scripted.post("/v1/completions", **asked).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in whole] == list(enumerate(expected))
    streamed = [""] * len(expected)
    for chunk in chunks_of(scripted.post("/v1/completions", **asked, stream=True)):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected


def test_a_long_prompt_holds_up_no_other_request(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tokenised in a thread: others are answered meanwhile."""
    begun, may_go_on = threading.Event(), threading.Event()
    encode = scripted.client.tokenizer.encode

    def held(text: str, *options: Any, **more: Any) -> list[int]:
        if len(text) > 5000:
            begun.set()
            assert may_go_on.wait(60)
        return encode(text, *options, **more)

    monkeypatch.setattr(scripted.client.tokenizer, "encode", held)

    async def run() -> list[int]:
        async with scripted.http() as http:
            long = asyncio.create_task(http.post("/v1/completions", json={"prompt": "word " * 2000}))
            while not begun.is_set():
                await asyncio.sleep(0.005)
            others = [await http.get("/health"), await http.post("/v1/completions", json={"prompt": "x"})]
            assert not long.done()
            may_go_on.set()
            return [answer.status_code for answer in (*others, await long)]

    assert asyncio.run(run()) == [200, 200, 400]
