"""Decode speed of a batch, measured where a caller stands: by the tokens that arrive and when.

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
from slipstream.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.client import EngineClient


class Arrival(NamedTuple):
    """New tokens of one request, as they reached the caller."""

    request_idx: int
    time: float
    num_tokens: int
    finished: bool


class BatchRun(NamedTuple):
    start: float
    arrivals: list[Arrival]

    @property
    def first_token_s(self) -> float:
        """Time to the first token, mean over the batch."""
        firsts = {arrival.request_idx: arrival.time for arrival in reversed(self.arrivals) if arrival.num_tokens}
        return sum(firsts.values()) / len(firsts) - self.start


def run_batch(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> BatchRun:
    """Run the prompts as one batch, greedy and with end-of-sequence ignored; ``on_tokens`` hears of progress."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    requests = [client.prepare(prompt, params) for prompt in prompts]
    arrived: queue.SimpleQueue[tuple[int, float, RequestOutput]] = queue.SimpleQueue()

    def sink_of(idx: int) -> Callable[[RequestOutput], None]:
        return lambda output: arrived.put((idx, time.monotonic(), output))

    run = BatchRun(time.monotonic(), [])
    for idx, request in enumerate(requests):
        client.submit(request, sink_of(idx))
    counts = [0] * len(requests)
    num_running = len(requests)
    while num_running:
        idx, now, output = arrived.get()
        if output.error is not None:
            raise EngineError(output.error)
        new = len(output.token_ids) - counts[idx]
        counts[idx] += new
        num_running -= output.finished
        run.arrivals.append(Arrival(idx, now, new, output.finished))
        on_tokens(new)
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
