"""Queue slots: a request takes one for each choice, and releases them once, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from slipstream.errors import EngineError
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request
from slipstream.server.answers import CompletionAnswer
from slipstream.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedServer

PATH = "/v1/completions"


@pytest.fixture
def narrow(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Two continuations at once, and none that wait."""
    server = ScriptedServer(tokenizer, [("ab", 0, 0)], ServerSettings(max_queue=0), max_num_seqs=2)
    yield server
    server.close()


def statuses_at_once(server: ScriptedServer, num_requests: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of requests that are all there before the engine answers one."""
    held: list[Request] = []
    answer = server.engine.add

    async def ask_all() -> list[int]:
        async with server.http() as http:
            asking = [asyncio.ensure_future(http.post(PATH, json={"prompt": "x"})) for _ in range(num_requests)]
            while sum(one.done() for one in asking) + len(held) < num_requests:
                await asyncio.sleep(0.01)
            for request in held:
                answer(request)
            return sorted([(await one).status_code for one in asking])

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "add", held.append)
        return asyncio.run(asyncio.wait_for(ask_all(), 30))


def test_as_many_as_there_are_places_are_taken(narrow: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert statuses_at_once(narrow, 4, monkeypatch) == [200, 200, 429, 429]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", ["well", "refused", "the engine is away", "n beyond the queue", "fails later"])
def test_every_end_gives_the_places_back_once(
    narrow: ScriptedServer, ends: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at all, and the server would be full one day; twice, and it would take more than it can serve."""

    def be_away(request: Request) -> None:
        raise EngineError("the engine is being restarted")

    def fail_later(request: Request) -> None:
        updates = [TokenUpdate(request.request_id, [5]), TokenUpdate(request.request_id, [], "error", error="fault")]
        for seconds, update in zip((0.0, 0.05), updates, strict=True):
            asyncio.get_running_loop().call_later(seconds, narrow.engine.deliver, TokenUpdates.from_list([update]))

    asked = {"prompt": ["x", "y"], "stream": stream}
    statuses = {"well": [200], "refused": [400], "the engine is away": [503], "n beyond the queue": [400]}
    expected = statuses.get(ends, [200, 500] if stream else [500])  # a stream that has begun has told its status
    with monkeypatch.context() as patch:
        if ends == "refused":
            asked["prompt"] = ["x", "y" * 5000]  # the second is too long, when the first has its slot
        elif ends == "the engine is away":
            patch.setattr(narrow.engine, "add", be_away)
        elif ends == "fails later":
            patch.setattr(narrow.engine, "add", fail_later)
        elif ends == "n beyond the queue":
            asked["n"] = 2
        for _ in range(3):
            assert narrow.post(PATH, **asked).status_code in expected
    assert statuses_at_once(narrow, 3, monkeypatch) == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_written_is_an_error(
    narrow: ScriptedServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not silence."""

    def fail(*_: object) -> bytes:
        raise ValueError("no such figure")

    with monkeypatch.context() as patch:
        patch.setattr(CompletionAnswer, "closing" if stream else "whole_bytes", fail)
        answer = narrow.post(PATH, prompt="x", stream=stream)
    assert answer.status_code == 500 and "ValueError: no such figure" in answer.text
    assert statuses_at_once(narrow, 3, monkeypatch) == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_continuations_that_have_ended_are_open_no_more(scripted: ScriptedServer, stream: bool) -> None:
    """Each counts by itself, in the gauge and by how it ended."""
    assert scripted.post(PATH, prompt=["x", "y"], n=3, stream=stream).status_code == 200
    metrics = scripted.ask("GET", "/metrics").text
    assert "\nslipstream_open_completions 0.0\n" in metrics
    assert '\nslipstream_completions_total{reason="length"} 6.0\n' in metrics
