"""Decode speed of a batch of ``LLM.generate``, from the times at which tokens leave the engine.

The rate counts whole steps in which every request of the batch decodes. The clock starts when the last request gets its
first token and stops at that request's last token before any request ends. Prefill is not included, nor is the tail in
which earlier requests have ended and the batch has shrunk.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import ConfigError, EngineError
from slipstream.output import DraftStats, RequestOutput, TokenUpdates
from slipstream.sampling_params import SamplingParams
from slipstream.structured import StructuredOutput

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
        """Mean tokens per step and request, with or without drafts."""
        return sum(arrival.num_tokens for arrival in self.arrivals) / max(1, len(self.arrivals))

    @property
    def drafts(self) -> DraftStats:
        """Acceptance over all requests."""
        stats = DraftStats()
        for arrival in self.arrivals:
            if arrival.num_drafts:
                stats.add(arrival.num_drafts, arrival.num_accepted)
        return stats


def wait_for_graphs(client: EngineClient) -> None:
    """Wait until an idle engine has captured all its graphs, so that the steady state is measured."""
    while client.stats.num_missing_graphs:
        time.sleep(_LOOK_EVERY_S)


def in_turns(num_turns: int, run_each: Sequence[Callable[[], BatchRun]]) -> list[list[BatchRun]]:
    """Runs of several engines, alternating, since the speed of a machine drifts over time."""
    runs: list[list[BatchRun]] = [[] for _ in run_each]
    for _ in range(num_turns):
        for run, own in zip(run_each, runs, strict=True):
            own.append(run())
    return runs


class _Step(NamedTuple):
    """What is recorded of a step. Few objects, since the garbage collector walks all of them."""

    time: float
    request_ids: Sequence[str]
    num_tokens: Sequence[int]
    num_drafts: Sequence[int]
    num_accepted: Sequence[int]
    ended: list[str]

    @classmethod
    def from_updates(cls, updates: TokenUpdates) -> _Step:
        no_drafts = (0,) * len(updates)
        drafts = (updates.num_drafts or no_drafts, updates.num_accepted or no_drafts)
        return cls(updates.time, updates.request_ids, tuple(map(len, updates.token_ids)), *drafts, updates.ended)


def run_batch(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    ignore_eos: bool = True,
    structured: StructuredOutput | Sequence[StructuredOutput | None] | None = None,
) -> BatchRun:
    """Run the prompts as one batch, greedy, to their length or to their end; ``on_tokens`` reports progress.

    ``structured``: of every request, or of each.
    """
    each = structured if isinstance(structured, Sequence) else [structured] * len(prompts)
    common = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=ignore_eos)
    pairs = zip(prompts, each, strict=True)
    submissions = [client.prepare(prompt, replace(common, structured=own)) for prompt, own in pairs]
    # The engine has its own ids; outputs have those of the submissions.
    index = {submission.requests[0].request_id: idx for idx, submission in enumerate(submissions)}
    output_place = {submission.request_id: idx for idx, submission in enumerate(submissions)}
    collected: queue.SimpleQueue[_Step] = queue.SimpleQueue()
    steps: list[_Step] = []
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    run = BatchRun(time.monotonic(), [], [[] for _ in submissions])
    with client.tapped(lambda updates: collected.put(_Step.from_updates(updates))):
        for submission in submissions:
            client.submit(submission, done.put, every_token=False)
        num_running = len(submissions)
        while num_running:
            # Polled rarely: a reader that wakes up at every step would slow down the engine.
            time.sleep(_LOOK_EVERY_S)
            while not collected.empty():
                steps.append(collected.get())
                num_running -= len(index.keys() & steps[-1].ended)  # requests of other callers may run beside these
                on_tokens(sum(steps[-1].num_tokens))
        # Processed only now, when no step competes for the GIL.
        for step in steps:
            columns = zip(step.request_ids, step.num_tokens, step.num_drafts, step.num_accepted, strict=True)
            for request_id, num_tokens, *drafts in columns:
                if request_id not in index:
                    continue
                finished = request_id in step.ended
                run.arrivals.append(Arrival(index[request_id], step.time, num_tokens, finished, *drafts))
        for _ in submissions:
            if (output := done.get()).error is not None:
                raise EngineError(output.error)
            run.token_ids[output_place[output.request_id]] = output.token_ids
    return run


def decode_rate(arrivals: Sequence[Arrival]) -> float:
    """Output tokens per second over the whole steps in which every request decodes; see the module's docstring."""
    begun: dict[int, int] = {}
    for position, arrival in enumerate(arrivals):
        begun.setdefault(arrival.request_idx, position)
    last_to_begin = max(begun, key=lambda idx: begun[idx])
    first_end = next(position for position, arrival in enumerate(arrivals) if arrival.finished)
    # Between two tokens of one request there is a whole number of steps, in each of which the others took part.
    marks = [p for p, arrival in enumerate(arrivals[: first_end + 1]) if arrival.request_idx == last_to_begin]
    if len(marks) < 2:
        raise ConfigError("the first request ended before the last one had begun to decode; raise --output-len")
    begin, end = marks[0], marks[-1]
    num_tokens = sum(arrival.num_tokens for arrival in arrivals[begin + 1 : end + 1])
    return num_tokens / (arrivals[end].time - arrivals[begin].time)
