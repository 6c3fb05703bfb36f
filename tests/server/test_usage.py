"""What answers say of tokens, and of failures, where a request has several prompts and continuations."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request

from .scripted import ScriptedServer, chunks_of

PATH = "/v1/completions"
NUM_CACHED = {"x": 0, "four": 3, "seven..": 6}  # by prompt


@pytest.fixture
def counted(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedServer:
    """Continuation i of a prompt has i + 1 tokens, and finds in the cache what is said above."""

    def answer(request: Request) -> None:
        prompt = scripted.client.tokenizer.decode(request.prompt_token_ids)
        token_ids = scripted.client.tokenizer.encode("abc"[: request.choice + 1], add_special_tokens=False)
        update = TokenUpdate(request.request_id, token_ids, "length", num_cached_tokens=NUM_CACHED[prompt])
        scripted.engine.deliver(TokenUpdates.from_list([update]))

    monkeypatch.setattr(scripted.engine, "add", answer)
    return scripted


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_that_of_all_prompts_and_continuations(counted: ScriptedServer, stream: bool) -> None:
    """A prompt counts once, however many continuations it has."""
    asked: dict[str, Any] = {"prompt": list(NUM_CACHED), "n": 3}
    if stream:
        answer = counted.post(PATH, **asked, stream=True, stream_options={"include_usage": True})
        usage = chunks_of(answer)[-1]["usage"]
    else:
        usage = counted.post(PATH, **asked).json()["usage"]
    num_prompt, num_output = 1 + 4 + 7, 3 * (1 + 2 + 3)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
    assert usage["total_tokens"] == num_prompt + num_output
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 + 3 + 6


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_a_request_that_fails_is_told_apart_from_an_engine_that_is_lost(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, reason: Any, status: int
) -> None:
    """The one would fail again; the other may be sent again, and clients do so by the status."""

    def fail(request: Request) -> None:
        update = TokenUpdate(request.request_id, [], reason, error="what happened")
        scripted.engine.deliver(TokenUpdates.from_list([update]))

    monkeypatch.setattr(scripted.engine, "add", fail)
    asked: dict[str, Any] = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
    answer = scripted.post(path, **asked)
    assert answer.status_code == status
    assert "what happened" in answer.json()["error"]["message"]


def test_the_time_to_the_first_token_is_that_of_the_first(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else comes for the request, and however long after; each request counts once."""

    def answer(request: Request) -> None:
        for seconds, ends in ((1.5, None), (2.5, None), (4.0, "length")):
            update = TokenUpdate(request.request_id, [5], ends, time=request.arrival_time + seconds)  # type: ignore[arg-type]
            scripted.engine.deliver(TokenUpdates.from_list([update]))

    monkeypatch.setattr(scripted.engine, "add", answer)
    assert scripted.post(PATH, prompt="x", n=2).status_code == 200
    lines = scripted.ask("GET", "/metrics").text.splitlines()
    (total,) = [line for line in lines if line.startswith("slipstream_time_to_first_token_seconds_sum ")]
    assert float(total.split()[1]) == pytest.approx(1.5)
    assert "slipstream_time_to_first_token_seconds_count 1.0" in lines
