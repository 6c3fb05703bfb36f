"""How far rounding moves a token's log probability, for ``spec_bench.py``: below which gap two tokens are a near-tie.

The engine computes the likeliest tokens in two ways: alone while it decodes, and with all others in a prompt. In
exact arithmetic both give the same log probability; what lies between them is rounding. Two scores can each be off by
the largest change that was seen, in opposite directions: so gaps below twice that change are near-ties.

An engine that is wrong in one of the two ways would allow itself wide gaps. Median and 99.9th percentile are reported
beside the largest change, to show whether it is the end of a tail or typical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slipstream.commands.results import Row
from slipstream.engine.client import EngineClient
from slipstream.errors import EngineError
from slipstream.output import Logprobs, RequestOutput
from slipstream.sampling_params import SamplingParams
from spec_bench_runs import answers_to

_NUM_LIKELY = 4  # tokens of each position: the log probability of a nearly certain one hardly changes


class Noise(NamedTuple):
    """Changes of one token's log probability between the two ways, over many tokens."""

    largest: float
    median: float
    p999: float
    num_tokens: int
    batch: int  # requests that decoded at a time

    @classmethod
    def from_changes(cls, changes: Sequence[float], batch: int) -> Noise:
        median, p999 = np.quantile(changes, [0.5, 0.999]).tolist()
        return cls(max(changes), median, p999, len(changes), batch)

    @property
    def tolerance(self) -> float:
        return 2 * self.largest

    @property
    def row(self) -> Row:
        figures = {name: round(getattr(self, name), 6) for name in ("largest", "median", "p999", "tolerance")}
        return {"case": "noise", "batch": self.batch, **figures, "num_tokens": self.num_tokens}

    def __str__(self) -> str:
        return (
            f"the same token's log probability differs by up to {self.largest:.3g} between decoding and a prompt, "
            f"median {self.median:.3g}, 99.9th percentile {self.p999:.3g}, over {self.num_tokens:,} tokens: "
            f"gaps below {self.tolerance:.3g} are near-ties"
        )


def measure_noise(
    client: EngineClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int
) -> Noise:
    """Answer the prompts, then have the engine score prompts and answers together."""
    answers = answers_to(client, prompts, [replace(one, logprobs=_NUM_LIKELY) for one in params], batch)
    whole = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    again = [replace(one, max_tokens=1, prompt_logprobs=_NUM_LIKELY) for one in params]
    scored = answers_to(client, whole, again, batch)
    changes = []
    for prompt, answer, output in zip(prompts, answers, scored, strict=True):
        for one, other in zip(_of_answer(answer), _of_prompt(output)[len(prompt) :], strict=True):
            changes += [abs(one[token].logprob - other[token].logprob) for token in one.keys() & other.keys()]
    return Noise.from_changes(changes, batch)


def _of_answer(output: RequestOutput) -> list[Logprobs]:
    found = output.outputs[0].logprobs
    if found is None:
        raise EngineError("the engine gave no log probabilities of an answer")
    return found


def _of_prompt(output: RequestOutput) -> list[Logprobs]:
    """Empty for the first token, which nothing comes before."""
    found = output.prompt_logprobs
    if found is None:
        raise EngineError("the engine gave no log probabilities of a prompt")
    return [one or {} for one in found]
