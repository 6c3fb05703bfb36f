"""Text, ends and figures from token updates made by hand: no engine runs here."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from slipstream.engine.admission import Submission
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.reader import OutputReader, OutputThread
from slipstream.engine.stats import EngineStats
from slipstream.output import SYNTHETIC_NOTICE, LogprobRow, RequestOutput, TokenUpdate, TokenUpdates
from slipstream.speculative_config import SpeculativeConfig
from tests.engine.drive import make_request

NGRAM = SpeculativeConfig("ngram", 4)
SYNTHETIC = SpeculativeConfig("ngram", 2, "synthetic", acceptance_rates=(0.5, 0.25))


class Letters:
    """One token a letter."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class Bench:
    """An output processor, what it told the engine to end, and what it delivered."""

    def __init__(self, speculative: SpeculativeConfig | None) -> None:
        self.ended: list[str] = []
        self.outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.processor = OutputProcessor(Letters(), self.ended.append, speculative)
        self.thread = OutputThread(self.processor)

    def begin(self, *, every_token: bool = False, n: int = 1, **params: Any) -> None:
        first = make_request("a", [1, 2], **params)
        others = [make_request(f"a#{i}", [1, 2], **params) for i in range(1, n)]
        submission = Submission("a", None, (first, *others))
        reader = OutputReader(submission, self.outputs.put, every_token)
        reader.begin(self.processor.register(submission, reader))

    def say(self, text: str, drafts: tuple[int, int] = (0, 0), request_id: str = "a", **ends: Any) -> None:
        ids = [ord(letter) for letter in text]
        rows = [LogprobRow(1, [token_id], [-1.0]) for token_id in ids]
        num_drafts, num_accepted = drafts
        update = TokenUpdate(request_id, ids, logprobs=rows, num_drafts=num_drafts, num_accepted=num_accepted, **ends)
        self.thread.deliver(TokenUpdates.from_list([update]))

    def next(self) -> RequestOutput:
        return self.outputs.get(timeout=60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(NGRAM)
    yield made
    made.thread.close()


@pytest.mark.parametrize("every_token", [False, True])
def test_what_follows_a_stop_string_in_the_same_update_is_dropped(bench: Bench, every_token: bool) -> None:
    bench.begin(every_token=every_token, stop=["lo"], logprobs=0)
    bench.say("h", (4, 0))
    bench.say("ello w", (5, 5))
    bench.say("orld", (4, 3))  # was in flight
    output = bench.next()
    while not output.finished:
        output = bench.next()
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hel", "stop", "lo")
    assert choice.token_ids == [ord(letter) for letter in "hello"]
    assert choice.logprobs is not None and [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    assert bench.ended == ["a"]
    # The last accepted draft of the second step is after the end, and so is the target's own token.
    assert choice.speculation is not None
    assert (choice.speculation.num_steps, choice.speculation.num_drafts, choice.speculation.num_accepted) == (2, 9, 4)
    assert bench.outputs.empty()


def test_a_stop_string_across_two_updates(bench: Bench) -> None:
    bench.begin(every_token=True, stop=["END"], include_stop_str_in_output=True)
    bench.say("go E", (3, 3))
    assert bench.next().delta_text == "go "
    bench.say("ND of it", (7, 7))
    output = bench.next()
    assert (output.text, output.delta_text, output.finished) == ("go END", "END", True)
    assert output.token_ids == [ord(letter) for letter in "go END"]


def test_a_stop_string_counts_before_the_stop_token_behind_it(bench: Bench) -> None:
    bench.begin(stop=["b"])
    bench.say("abc.", (3, 3), finish_reason="stop", stop_reason=ord("."))
    output = bench.next()
    assert (output.text, output.outputs[0].stop_reason, output.token_ids) == ("a", "b", [97, 98])


def test_several_tokens_with_the_stop_token_last(bench: Bench) -> None:
    bench.begin(every_token=True)
    bench.say("ab", (1, 1))
    bench.say("cd.", (2, 2), finish_reason="stop", stop_reason=ord("."))
    assert [bench.next().text for _ in range(2)] == ["ab", "abcd"]


def test_stats_count_drafts_by_position(bench: Bench) -> None:
    bench.begin(every_token=True)
    bench.say("a")  # the prompt's own token: nothing was drafted for it
    first = bench.next().speculation
    assert first is not None and first.as_dict() == {
        "drafts": 0,
        "accepted": 0,
        "mean_length": 1.0,
        "acceptance_by_position": [],
    }
    bench.say("bcd", (4, 2))
    bench.say("e", (2, 0), finish_reason="length")
    earlier, last = bench.next().speculation, bench.next().speculation
    assert earlier is not None and earlier.num_drafts == 4, "what was handed out does not change"
    assert last is not None and last.as_dict() == {
        "drafts": 6,
        "accepted": 2,
        "mean_length": 2.0,
        "acceptance_by_position": [0.5, 0.5, 0.0, 0.0],
    }


def test_every_continuation_has_its_own_figures(bench: Bench) -> None:
    bench.begin(n=2)
    bench.say("ab", (3, 1), finish_reason="length")
    bench.say("a", (2, 0), request_id="a#1", finish_reason="length")
    output = bench.next()
    assert [c.speculation and c.speculation.num_drafts for c in output.outputs] == [3, 2]
    assert output.speculation is output.outputs[0].speculation


def test_an_engine_that_does_not_draft_has_no_figures() -> None:
    bench = Bench(None)
    bench.begin(logprobs=0)
    bench.say("ab", finish_reason="length")
    output = bench.next()
    bench.thread.close()
    assert output.speculation is None
    assert (output.text, output.delta_text) == ("ab", "ab")


def test_synthetic_acceptance_is_said_even_where_nothing_was_drafted() -> None:
    bench = Bench(SYNTHETIC)
    bench.begin()
    bench.say("a", finish_reason="length")
    figures = bench.next().speculation
    bench.thread.close()
    assert figures is not None and figures.as_dict()["synthetic"] == SYNTHETIC_NOTICE


def test_the_engine_counts_the_same() -> None:
    stats = EngineStats()
    assert stats.mean_accepted_length == 1.0
    for drafts in ((4, 2), (2, 0), (3, 3)):
        stats.drafts.add(*drafts)
    assert (stats.num_draft_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 5)
    assert stats.num_draft_tokens_at == [3, 3, 2, 1]
    assert stats.num_accepted_tokens_at == [2, 2, 1, 0]
    assert stats.mean_accepted_length == pytest.approx(1 + 5 / 3)
