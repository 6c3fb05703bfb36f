"""Running a load and noting when its tokens come: the common part of ``prompts.py`` and ``mixed_load.py``."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.engine.client import EngineClient
from slipstream.errors import EngineError
from slipstream.output import RequestOutput, TokenUpdates
from slipstream.sampling_params import SamplingParams

_LOOK_EVERY_S = 0.02


class Asked(NamedTuple):
    """A request: seconds after the start, and its lengths."""

    at: float
    prompt_len: int
    output_len: int


@dataclass
class Run:
    """When requests were submitted, and when their tokens left the engine."""

    asked: Sequence[Asked]
    begin: float
    submitted: list[float] = field(default_factory=list)
    tokens: list[list[float]] = field(default_factory=list)  # times, of each request
    lengths: list[tuple[float, int]] = field(default_factory=list)  # seconds after the start, draft length from then on

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.tokens) - self.begin

    @property
    def num_out(self) -> int:
        return sum(map(len, self.tokens))

    def first_token_ms(self, longest: int = 1 << 30) -> list[float]:
        """Of requests with prompts up to this length."""
        pairs = zip(self.asked, self.submitted, self.tokens, strict=True)
        return [1000 * (times[0] - came) for asked, came, times in pairs if asked.prompt_len <= longest]

    def percentile_ms(self, percent: float) -> float:
        """Of the times between tokens; 0 where no request has two."""
        between = np.concatenate([np.diff(times) for times in self.tokens])
        return 1000 * float(np.percentile(between, percent)) if len(between) else 0.0


class _Notes:
    """Called from the output thread with every step's tokens. Read once no step competes for the interpreter."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.steps: queue.SimpleQueue[tuple[TokenUpdates, int]] = queue.SimpleQueue()

    def note(self, updates: TokenUpdates) -> None:
        self.steps.put((updates, self._client.stats.draft_length))


def run_load(client: EngineClient, asked: Sequence[Asked], seed: int = 0) -> Run:
    """Submit each request at its time, greedy, to its full length. The requests are in the order of their times."""
    rng, vocab_size = random.Random(f"tokens {seed}"), client.config.model.vocab_size
    submissions = []
    for one in asked:
        params = SamplingParams(temperature=0.0, max_tokens=one.output_len, ignore_eos=True)
        submissions.append(client.prepare([rng.randrange(vocab_size) for _ in range(one.prompt_len)], params))
    index = {submission.requests[0].request_id: idx for idx, submission in enumerate(submissions)}
    notes, done = _Notes(client), queue.SimpleQueue[RequestOutput]()
    run = Run(asked, time.monotonic(), tokens=[[] for _ in asked])
    with client.tapped(notes.note):
        for one, submission in zip(asked, submissions, strict=True):
            if (left := run.begin + one.at - time.monotonic()) > 0:
                time.sleep(left)
            run.submitted.append(time.monotonic())
            client.submit(submission, done.put, every_token=False)
        outputs: list[RequestOutput] = []
        while len(outputs) < len(submissions):
            time.sleep(_LOOK_EVERY_S)  # a reader that wakes at every step would slow down the engine
            while not done.empty():
                outputs.append(done.get())
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
    while not notes.steps.empty():
        updates, length = notes.steps.get()
        if not run.lengths or run.lengths[-1][1] != length:
            run.lengths.append((round(updates.time - run.begin, 3), length))
        for request_id, new in zip(updates.request_ids, updates.token_ids, strict=True):
            if request_id in index:
                run.tokens[index[request_id]] += [updates.time] * len(new)
    return run


def burst(num_requests: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[Asked]:
    """All at once, lengths drawn evenly. 256 with prompts of 100 to 2,000 and outputs of 50 to 400 tokens have 269,006
    prompt and 57,033 output tokens: those of the figures it is compared with.
    """
    rng = random.Random(1)
    return [Asked(0.0, rng.randint(*prompts), rng.randint(*outputs)) for _ in range(num_requests)]


def poisson(asked: Sequence[Asked], rate: float) -> list[Asked]:
    """The same requests, so many a second on average, independently of each other."""
    rng, due, found = random.Random(2), 0.0, []
    for one in asked:
        found.append(one._replace(at=due))
        due += rng.expovariate(rate)
    return found


def among_long(
    num_long: int, long_len: int, num_short: int, short: tuple[int, int], within: tuple[float, float]
) -> list[Asked]:
    """Short prompts that arrive at random while long ones, submitted first, are in work."""
    rng = random.Random(3)
    arrivals = [Asked(rng.uniform(*within), rng.randint(*short), 16) for _ in range(num_short)]
    return [*[Asked(0.0, long_len, 4)] * num_long, *sorted(arrivals)]
