"""Verification of drafts, for every method: which are accepted, and which token follows the last accepted one.

The target computes logits after the last known token and after every draft, and all of a step are processed together.
Three modes. ``match`` samples the target's token at each position with the request's own noise for it, and accepts
drafts while they equal it, so the text is the one without drafts. ``rejection`` is speculative sampling: the
distribution is the same, and more drafts are accepted where both models are uncertain. ``synthetic`` accepts at given
rates, for benchmarks.

"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.native.step import compiled, in_c
from slipstream.kernels.step.commit import CheckedTokens
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.sampling.check_logits import check_logits
from slipstream.sampling.draw import DrawKeys
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.mask import TokenMasks, allows, apply_mask
from slipstream.sampling.operation import Positions, SamplingRows
from slipstream.sampling.sampler import Sampled, SamplingNeeds, process, sample
from slipstream.speculate.rejection import DraftTokens, DrawnFrom, judge_drafts
from slipstream.speculate.synthetic import force_acceptance
from slipstream.speculative_config import SpeculativeConfig


class Drafted(NamedTuple):
    """The drafts of a step, aligned with the logits."""

    at: Positions
    draft_ids: Tensor  # [n] int32: the draft for the position that the logits are for; -1 if there is none
    logit_start_loc: Tensor  # [padded_reqs + 1] int32
    are_none: bool = False  # one logit per request, and no draft slots


class Verified(NamedTuple):
    tokens: CheckedTokens  # [padded_reqs, k + 1], or one token without drafts
    logprobs: Tensor | None  # [n, LOGPROB_WIDTH] int32, packed


class Verifier:
    def __init__(
        self,
        config: SpeculativeConfig | None,
        max_reqs: int,
        num_tokens: Tensor,  # [num_rows] int32
        drawn_from: DrawnFrom | None = None,
    ) -> None:
        self._mode = "none" if config is None else config.verify
        self._width = 1 if config is None else 1 + config.num_drafts
        self._num_tokens = num_tokens
        self._drawn_from = drawn_from
        self._nothing_accepted = torch.zeros(max_reqs, dtype=torch.int32, device=num_tokens.device)
        rates = () if config is None else config.acceptance_rates
        self._rates = torch.tensor(rates, dtype=torch.float32).to(num_tokens.device)

    def set_rates(self, rates: Sequence[float]) -> None:
        """For ``synthetic`` in benchmarks whose acceptance changes; captured steps follow."""
        self._rates.copy_(torch.tensor(rates, dtype=torch.float32))

    def verify(
        self,
        logits: Tensor,  # [n, vocab]
        rows: SamplingRows,
        drafted: Drafted,
        needs: SamplingNeeds,
        masks: TokenMasks | None = None,  # for positions with a grammar
    ) -> Verified:
        if self._mode == "rejection":
            sampled, accepted = self._judge(logits, rows, drafted, needs, masks)
        else:
            sampled, accepted = sample(logits, rows, drafted.at, needs, masks), None
        forced = None
        if self._mode == "synthetic":
            accepted = forced = force_acceptance(*drafted.at, self._num_tokens, rows.seeds, rows.choice, self._rates)
            if masks is not None:
                accepted = forced = forced & allows(masks, drafted.draft_ids)
        if self._width == 1 or drafted.are_none:
            none = self._nothing_accepted[: sampled.token_ids.shape[0]]
            return Verified(
                CheckedTokens(sampled.token_ids.unsqueeze(1), none, sampled.failed, forced), sampled.logprobs
            )
        if forced is not None and needs.logprobs:
            taken_ids = torch.where(forced & (drafted.draft_ids >= 0), drafted.draft_ids, sampled.token_ids)
            raw = check_logits(logits)[0]
            raw = raw if masks is None else apply_mask(raw, masks)
            sampled = sampled._replace(logprobs=pack_logprobs(raw, taken_ids))
        taken = accept_drafts(
            sampled.token_ids, drafted.draft_ids, accepted, sampled.failed, drafted.logit_start_loc, self._width
        )
        return Verified(CheckedTokens(*taken, forced), sampled.logprobs)

    def _judge(
        self, logits: Tensor, rows: SamplingRows, drafted: Drafted, needs: SamplingNeeds, masks: TokenMasks | None
    ) -> tuple[Sampled, Tensor]:
        """Speculative sampling: which drafts are accepted, and the replacements of the others."""
        at, draft_ids = drafted.at, drafted.draft_ids
        raw, failed = check_logits(logits)
        if masks is not None:
            raw = apply_mask(raw, masks)
        processed = process(raw, rows, at, needs)
        if masks is not None:
            failed = failed | check_logits(processed)[1]
        drafts = DraftTokens(draft_ids, at.rows, at.positions - self._num_tokens[at.rows])
        keys = DrawKeys(rows.temperature, rows.seeds, at.positions, rows.choice)
        accepted, token_ids = judge_drafts(processed, drafts, keys, self._drawn_from)
        logprobs = None
        if needs.logprobs:
            logprobs = pack_logprobs(raw, torch.where(accepted, draft_ids.long(), token_ids))
        return Sampled(token_ids, failed, logprobs), accepted


def _shape(logit_start_loc: Tensor, width: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    num_reqs = logit_start_loc.shape[0] - 1
    return (
        TensorSpec((num_reqs, width), torch.int32),
        TensorSpec((num_reqs,), torch.int32),
        TensorSpec((num_reqs,), torch.bool),
    )


@operation(_shape)
def accept_drafts(
    target_ids: Tensor,  # [n] int64: the token to use if the draft is not accepted
    draft_ids: Tensor,  # [n] int32, -1 where there is none
    accepted: Tensor | None,  # [n] bool; None: accepted are drafts that equal the target's token
    failed: Tensor,  # [n] bool: no draft is accepted on logits without a usable number
    logit_start_loc: Tensor,  # [padded_reqs + 1] int32
    width: int,  # maximum logits of a request
) -> tuple[Tensor, Tensor, Tensor]:  # [padded_reqs, width] new tokens, [padded_reqs] accepted, [padded_reqs] failed
    num_reqs = logit_start_loc.shape[0] - 1
    if runs_triton(target_ids):
        new_ids = torch.empty(num_reqs, width, dtype=torch.int32, device=target_ids.device)
        num_accepted = torch.empty(num_reqs, dtype=torch.int32, device=target_ids.device)
        fails = torch.empty(num_reqs, dtype=torch.bool, device=target_ids.device)
        _accept_kernel[(num_reqs,)](
            target_ids,
            draft_ids,
            target_ids if accepted is None else accepted,
            failed,
            logit_start_loc,
            new_ids,
            num_accepted,
            fails,
            width,
            MATCH=accepted is None,
            WIDTH=next_power_of_2(width),
            num_warps=1,
            **early_start(target_ids),
        )
        return new_ids, num_accepted, fails
    idx = torch.arange(width)
    exists = idx < logit_start_loc.diff().unsqueeze(1)
    at = torch.where(exists, logit_start_loc[:-1].unsqueeze(1) + idx, 0).long()
    is_accepted = draft_ids == target_ids if accepted is None else accepted
    is_accepted = exists & (is_accepted & (draft_ids >= 0) & ~failed)[at]
    count = is_accepted.int().cumprod(1).sum(1)
    new_ids = torch.where(idx < count.unsqueeze(1), draft_ids[at], target_ids[at].int())
    last = at.gather(1, count.clamp(max=width - 1).unsqueeze(1)).squeeze(1)
    return torch.where(exists, new_ids, -1), count.int(), failed[last] & exists[:, 0]


@in_c(accept_drafts)
def _accept_in_c(
    target_ids: Tensor,
    draft_ids: Tensor,
    accepted: Tensor | None,
    failed: Tensor,
    logit_start_loc: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    specs = _shape(logit_start_loc, width)
    new_ids, num_accepted, fails = (torch.empty(spec.shape, dtype=spec.dtype) for spec in specs)
    found = (tensor.data_ptr() for tensor in (new_ids, num_accepted, fails))
    judged = None if accepted is None else accepted.data_ptr()
    given = (target_ids.data_ptr(), draft_ids.data_ptr(), judged, failed.data_ptr(), logit_start_loc.data_ptr())
    compiled().slip_accept_drafts(*given, *found, num_accepted.shape[0], width)
    return new_ids, num_accepted, fails


@jit
def _accept_kernel(
    target_ids,
    draft_ids,
    accepted,
    failed,
    logit_start_loc,
    new_ids,
    num_accepted,
    fails,
    width,
    MATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0)
    start = tl.load(logit_start_loc + i)
    idx = tl.arange(0, WIDTH)
    exists = idx < tl.load(logit_start_loc + i + 1) - start
    target = tl.load(target_ids + start + idx, mask=exists, other=-1).to(tl.int32)
    draft = tl.load(draft_ids + start + idx, mask=exists, other=-1)
    bad = tl.load(failed + start + idx, mask=exists, other=0) != 0
    is_accepted = draft == target if MATCH else tl.load(accepted + start + idx, mask=exists, other=0) != 0
    is_accepted = is_accepted & exists & (draft >= 0) & (bad == 0)
    count = tl.min(tl.where(is_accepted, WIDTH, idx), 0)
    count = tl.minimum(count, width)
    tl.store(new_ids + i.to(tl.int64) * width + idx, tl.where(idx < count, draft, target), mask=idx < width)
    tl.store(num_accepted + i, count)
    tl.store(fails + i, tl.max((bad & (idx == count)).to(tl.int32), 0) != 0)
