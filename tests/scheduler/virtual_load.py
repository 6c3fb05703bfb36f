"""The scheduler under load on a machine whose step costs are known: a clock that only steps move, no real time.

The machine is not of the form that the scheduler learns: reading weights and computing overlap, so that short steps
cost what reading takes. Its numbers are those of one NVIDIA H200 with the Llama-3.1-8B shape in bfloat16, from the
project's measurements: 42,000 prompt tokens a second, 330 TFLOP/s in attention over prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.config import CacheConfig, SchedulerConfig, StepRates
from slipstream.plan import RowStatus, StepPlan, StepResult
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.scheduler import Scheduler

_PARAMS = SamplingParams(temperature=0.0, seed=0)
# Deliberately wrong, as they are before the first step: the scheduler has to learn.
EXPECTED = StepRates(step=2e-3, token=50e-6, cached_key=100e-9, pair=0.2e-9, draft=1e-3)


class Machine(NamedTuple):
    launch_s: float = 0.5e-3
    weights_s: float = 3.6e-3  # reading them; computing overlaps
    token_s: float = 23.8e-6
    key_s: float = 40e-9  # of a decoding request
    pair_s: float = 1.6e-9
    mixed_s: float = 1.5e-3  # more where prompts run beside decodes, launch by launch

    def seconds(self, plan: StepPlan) -> float:
        composition, bounds = plan.composition, plan.num_computed_bounds.tolist()
        cached = pairs = num_prompts = 0
        for count, bound in zip(composition.num_tokens, bounds, strict=True):
            if count == 1:
                cached += bound
            else:
                num_prompts += 1
                pairs += count * bound + count * (count + 1) // 2
        computing = max(self.weights_s, self.token_s * composition.total_tokens)
        mixed = self.mixed_s if num_prompts else 0.0
        return self.launch_s + computing + self.key_s * cached + self.pair_s * pairs + mixed


class Arrival(NamedTuple):
    at: float
    prompt_len: int
    output_len: int


@dataclass
class Outcome:
    arrivals: Sequence[Arrival]
    times: list[list[float]]  # of the tokens of each request
    steps: list[tuple[StepPlan, float]] = field(default_factory=list)  # with their seconds

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.times)

    def first_tokens(self, longest: int = 1 << 30) -> list[float]:
        """Times to the first token, of prompts up to this length."""
        pairs = zip(self.arrivals, self.times, strict=True)
        return [times[0] - arrival.at for arrival, times in pairs if arrival.prompt_len <= longest]

    def between_tokens(self) -> np.ndarray:
        return np.concatenate([np.diff(times) for times in self.times])


def make_config(max_num_seqs: int = 256, **settings: object) -> SchedulerConfig:
    config = {"prefix_caching": False, "limits_time": True, "step_rates": EXPECTED, **settings}
    return SchedulerConfig(max_num_seqs, 8192, 8192, 33_000, **config)  # type: ignore[arg-type]


def serve(
    config: SchedulerConfig, arrivals: Sequence[Arrival], machine: Machine | None = None, steps_in_flight: int = 2
) -> Outcome:
    """All requests to their ends, each token when the step is collected that made it."""
    machine = machine or Machine()
    scheduler = Scheduler(config, CacheConfig(page_size=16, num_pages=60_001))
    outcome = Outcome(arrivals, [[] for _ in arrivals])
    waiting = deque(sorted(range(len(arrivals)), key=lambda idx: arrivals[idx].at))
    in_flight: deque[tuple[StepPlan, float, float]] = deque()  # when each begins and ends
    now = device_free = last_end = 0.0
    while waiting or scheduler.has_requests:
        while waiting and arrivals[waiting[0]].at <= now:
            idx = waiting.popleft()
            _, prompt_len, output_len = arrivals[idx]
            scheduler.add(Request(str(idx), (idx % 7,) * prompt_len, _PARAMS, (), prompt_len + output_len))
        while len(in_flight) < steps_in_flight and (plan := scheduler.schedule()) is not None:
            begin = max(now, device_free)
            device_free = begin + machine.seconds(plan)
            in_flight.append((plan, begin, device_free))
        if not in_flight:
            now = arrivals[waiting[0]].at
            continue
        plan, begin, now = in_flight.popleft()
        outcome.steps.append((plan, now - max(begin, last_end)))
        scheduler.observe_seconds(plan, now - max(begin, last_end))
        last_end = now
        scheduler.collect(_result(plan, outcome, now))
    scheduler.check_idle()
    return outcome


def _result(plan: StepPlan, outcome: Outcome, now: float) -> StepResult:
    tokens: list[list[int]] = []
    statuses = []
    for request_id, samples in zip(plan.composition.request_ids, plan.composition.samples, strict=True):
        idx = int(request_id)
        times, limit = outcome.times[idx], outcome.arrivals[idx].output_len
        tokens.append([5] if samples and len(times) < limit else [])
        times += [now] * len(tokens[-1])
        statuses.append(RowStatus.LENGTH if len(times) >= limit else RowStatus.RUNNING)
    none = [0] * len(tokens)
    return StepResult(plan, tokens, statuses, none, none, none)
