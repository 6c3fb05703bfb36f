"""Decode speed of a batch of ``LLM.generate``: by the tokens that leave the engine and when.

The rate counts whole steps in which every request of the batch decodes. The clock starts when the last request to begin
gets its first token and stops at that request's last token before any request ends. Prefill is outside, and so is the
tail where requests that began earlier have ended and the batch has shrunk.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import ConfigError, EngineError
from slipstream.output import DraftStats, RequestOutput
from slipstream.types import SamplingParams, TokenUpdates

if TYPE_CHECKING:
    from slipstream.engine.client import EngineClient


_LOOK_EVERY_S = 0.05


class Arrival(NamedTuple):
    """New tokens of one request, when they left the engine."""

    request_idx: int
    time: float
    num_tokens: int
    finished: bool
    num_drafts: int = 0
    num_accepted: int = 0


class BatchRun(NamedTuple):
    start: float
    arrivals: list[Arrival]
    token_ids: list[list[int]]  # of each request, in order

    @property
    def first_token_s(self) -> float:
        """Time to the first token, mean over the batch."""
        firsts = {arrival.request_idx: arrival.time for arrival in reversed(self.arrivals) if arrival.num_tokens}
        return sum(firsts.values()) / len(firsts) - self.start

    @property
    def tokens_a_step(self) -> float:
        """That a request gets on average, with drafts or without."""
        return sum(arrival.num_tokens for arrival in self.arrivals) / max(1, len(self.arrivals))

    @property
    def drafts(self) -> DraftStats:
        """How drafts fared, all requests together."""
        stats = DraftStats()
        for arrival in self.arrivals:
            if arrival.num_drafts:
                stats.add(arrival.num_drafts, arrival.num_accepted)
        return stats


def wait_for_graphs(client: EngineClient) -> None:
    """Until an engine without work has recorded all it means to: figures are of one that has run a while."""
    while client.stats.num_missing_graphs:
        time.sleep(_LOOK_EVERY_S)


def in_turns(num_turns: int, run_each: Sequence[Callable[[], BatchRun]]) -> list[list[BatchRun]]:
    """Runs of several engines, one of each a turn: a machine is not as fast at one time as at another."""
    runs: list[list[BatchRun]] = [[] for _ in run_each]
    for _ in range(num_turns):
        for run, own in zip(run_each, runs, strict=True):
            own.append(run())
    return runs


class _Step(NamedTuple):
    """What a run keeps of a step. Few objects: the collector of garbage looks at all that are kept."""

    time: float
    request_ids: Sequence[str]
    num_tokens: Sequence[int]
    num_drafts: Sequence[int]
    num_accepted: Sequence[int]
    ended: list[str]

    @classmethod
    def of(cls, updates: TokenUpdates) -> _Step:
        no_drafts = (0,) * len(updates)
        drafts = (updates.num_drafts or no_drafts, updates.num_accepted or no_drafts)
        return cls(updates.time, updates.request_ids, tuple(map(len, updates.token_ids)), *drafts, updates.ended)


def run_batch(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    ignore_eos: bool = True,
) -> BatchRun:
    """Run the prompts as one batch, greedy, to their length or to their end; ``on_tokens`` hears of progress."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=ignore_eos)
    submissions = [client.prepare(prompt, params) for prompt in prompts]
    # The engine has ids of its own; outputs have those of the submissions.
    place = {submission.requests[0].request_id: idx for idx, submission in enumerate(submissions)}
    output_place = {submission.request_id: idx for idx, submission in enumerate(submissions)}
    collected: queue.SimpleQueue[_Step] = queue.SimpleQueue()
    steps: list[_Step] = []
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    run = BatchRun(time.monotonic(), [], [[] for _ in submissions])
    with client.tapped(lambda updates: collected.put(_Step.of(updates))):
        for submission in submissions:
            client.submit(submission, done.put, every_token=False)
        num_running = len(submissions)
        while num_running:
            # What is not ready yet is looked for later: a reader that wakes up at every step would slow the engine.
            time.sleep(_LOOK_EVERY_S)
            while not collected.empty():
                steps.append(collected.get())
                num_running -= len(steps[-1].ended)
                on_tokens(sum(steps[-1].num_tokens))
        # Looked at one by one only now, when no step waits for the interpreter.
        for step in steps:
            columns = zip(step.request_ids, step.num_tokens, step.num_drafts, step.num_accepted, strict=True)
            for request_id, num_tokens, *drafts in columns:
                finished = request_id in step.ended
                run.arrivals.append(Arrival(place[request_id], step.time, num_tokens, finished, *drafts))
        for _ in submissions:
            if (output := done.get()).error is not None:
                raise EngineError(output.error)
            run.token_ids[output_place[output.request_id]] = output.token_ids
    return run


def decode_rate(arrivals: Sequence[Arrival]) -> float:
    """Output tokens per second over the whole steps in which every request decodes; see the module's text."""
    begun: dict[int, int] = {}
    for position, arrival in enumerate(arrivals):
        begun.setdefault(arrival.request_idx, position)
    last_to_begin = max(begun, key=lambda idx: begun[idx])
    first_end = next(position for position, arrival in enumerate(arrivals) if arrival.finished)
    # Between two tokens of one request lies a whole number of steps, in which the others have had as many turns.
    marks = [p for p, arrival in enumerate(arrivals[: first_end + 1]) if arrival.request_idx == last_to_begin]
    if len(marks) < 2:
        raise ConfigError("the first request ended before the last one had begun to decode; raise --output-len")
    begin, end = marks[0], marks[-1]
    num_tokens = sum(arrival.num_tokens for arrival in arrivals[begin + 1 : end + 1])
    return num_tokens / (arrivals[end].time - arrivals[begin].time)
