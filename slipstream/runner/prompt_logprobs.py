"""Log probabilities of prompt tokens, from the hidden states of the step that computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.plan import StepPlan
from slipstream.runner.async_output import PromptSpan
from slipstream.sampling.exact_logprobs import pack_exact_logprobs
from slipstream.sampling.logprobs import pack_logprobs

# Positions whose logits, a row of the vocabulary each, are in memory at a time.
_SCORED_AT_ONCE = 128


def score_prompts(
    plan: StepPlan,
    hidden: Tensor,  # [num_tokens, hidden]
    token_ids: Tensor,  # [num_rows, max_len] int32
    scored_prompt_len: Callable[[int], int],  # by row: prompt tokens to score; 0: none
    compute_logits: Callable[[Tensor], Tensor],
    exact: bool = False,
) -> tuple[tuple[PromptSpan, ...], Tensor | None]:
    """The ranges and their packed log probabilities, for the requests of the plan that asked for them.

    While a prompt is computed the host's lengths are exact, so the ranges are host arithmetic. The state at position p
    scores the token at p + 1; the last prompt position belongs to the first output.
    """
    pack = pack_exact_logprobs if exact else pack_logprobs
    spans, packed, start = [], [], 0
    for i, scheduled in enumerate(plan.requests):
        first = scheduled.num_computed_bound
        count = min(first + scheduled.num_tokens, scored_prompt_len(scheduled.row) - 1) - first
        if count > 0:
            spans.append(PromptSpan(i, first + 1, count))
            targets = token_ids[scheduled.row, first + 1 : first + 1 + count]
            for at in range(0, count, _SCORED_AT_ONCE):
                end = min(at + _SCORED_AT_ONCE, count)
                packed.append(pack(compute_logits(hidden[start + at : start + end]), targets[at:end]))
        start += scheduled.num_tokens
    return tuple(spans), torch.cat(packed) if packed else None
