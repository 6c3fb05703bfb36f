"""How many prompt tokens a step may have: by number, and by how long the step may take.

A step that also decodes delays the next token of every running request, so its time is limited. A step of prompts
alone delays requests that arrive meanwhile: its time is limited as well, but not below the default limit. Each limit
is turned into tokens by the measured cost of steps (``step_model``), chunk by chunk: a token far into a long prompt
attends to more keys and costs more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config import SchedulerConfig, StepRates
from slipstream.plan import StepPlan
from slipstream.scheduler.request_state import RequestState
from slipstream.scheduler.step_model import StepModel, StepWork, count_pairs

# A request that arrives waits for the steps in flight and for its own: with two of them, 225 ms to its first token.
_USUAL_LIMIT_S = 0.075
# A step with prompts is as long as this many times what a step costs without doing anything, so that cutting prompts
# into more steps costs at most that part of the throughput.
_TIMES_STEP = 10
_RISE = 1.01  # of the shortest decode, with every later one: a machine may become slower
_AIM = 0.95  # of the limit: predictions are not exact
_LEAST_SHARE = 1 / 8  # of the decodes' time for prompts, where those alone take the limit or more
_LEAST_TOKENS = 16
_SHORT_SHARE = 0.5  # of a step's room for prompts that end in it, before older ones


@dataclass(slots=True)
class StepRoom:
    """What is left of a step for prompts."""

    tokens: int
    seconds: float  # infinite: no limit
    rates: StepRates
    least: int = 0  # tokens that fit whatever they cost, so that every step with prompts gets on

    def fits(self, num_tokens: int, num_computed: int) -> int:
        """How many of a prompt's next tokens fit; it has computed so many before them."""
        most = min(num_tokens, self.tokens)
        if most <= 0 or math.isinf(self.seconds):
            return max(0, most)
        if self.seconds >= self._cost(most, num_computed):
            return most
        # Of n tokens: n * first + n^2 * slope.
        slope = self.rates.pair / 2
        first = self.rates.token + self.rates.pair * (num_computed + 0.5)
        seconds = max(0.0, self.seconds)
        by_time = int(2 * seconds / (first + math.sqrt(first * first + 4 * slope * seconds)))
        return min(most, max(by_time, self.least))

    def take(self, num_tokens: int, num_computed: int) -> None:
        self.tokens -= num_tokens
        self.least -= num_tokens
        if not math.isinf(self.seconds):
            self.seconds -= self._cost(num_tokens, num_computed)

    def _cost(self, num_tokens: int, num_computed: int) -> float:
        return self.rates.token * num_tokens + self.rates.pair * count_pairs(num_tokens, num_computed)

    def for_short(self) -> StepRoom:
        """The part in which prompts that end in this step may go before older ones."""
        return StepRoom(int(self.tokens * _SHORT_SHARE), self.seconds * _SHORT_SHARE, self.rates)


class PromptBudget:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.model = StepModel(config.step_rates)
        self._num_decode_steps = 0
        # At least what an empty step takes. The rates alone do not say: steps with prompts are mostly alike.
        self._shortest_s = config.step_rates.step
        self._has_decoded = False

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """The duration of a collected step. Of those that decode alone, which are many and alike, every eighth."""
        if not self._config.limits_time:
            return
        if plan.num_tokens == plan.composition.num_reqs:
            known = _RISE * self._shortest_s if self._has_decoded else seconds
            self._shortest_s, self._has_decoded = min(seconds, known), True
            self._num_decode_steps += 1
            if self._num_decode_steps % 8 != 1:
                return
        self.model.observe(plan, seconds)

    def limit(self, decodes: bool) -> float:
        """Seconds that a step with prompts may take."""
        usual = max(_USUAL_LIMIT_S, _TIMES_STEP * min(self._shortest_s, self.model.rates.step))
        asked = self._config.max_itl_s
        if asked is None:
            return usual
        return asked if decodes else max(asked, usual)

    def room(self, decodes: Sequence[RequestState], num_tokens: int, num_proposed: int) -> StepRoom:
        """For prompts beside these decodes, whose tokens and drafts are so many. Asked before they are launched."""
        config = self._config
        left = config.max_num_batched_tokens - num_tokens
        if decodes:
            left = min(left, config.mixed_prefill_tokens)
        if not config.limits_time:
            return StepRoom(left, math.inf, self.model.rates)
        num_cached = sum(state.num_computed for state in decodes)
        taken = self.model.seconds(StepWork(1, num_tokens, num_cached, 0, num_proposed))
        seconds = max(_AIM * self.limit(bool(decodes)) - taken, _LEAST_SHARE * taken)
        return StepRoom(left, seconds, self.model.rates, _LEAST_TOKENS)
