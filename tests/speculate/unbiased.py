"""Many trials of drafting and judging one token, and how far what comes out is from the target's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.sampling.draw import DrawKeys, draw_tokens
from slipstream.speculate.rejection import DraftTokens, DrawnFrom, judge_drafts

VOCAB_SIZE = 512
TEMPERATURE = 0.8
MIN_EXPECTED = 20.0
MAX_SIGMAS = 6.0


class Trials(NamedTuple):
    """Rows that differ in their seeds alone."""

    draft_logits: Tensor  # [n, draft_vocab] float32, before temperature
    seeds: Tensor  # [n, 2] int32
    positions: Tensor  # [n] int32
    choice: Tensor  # [n] int32
    temperature: Tensor  # [n] float32
    target_ids: Tensor | None  # [draft_vocab] int32: the tokens of the draft logits; None: all


class Drafts(NamedTuple):
    ids: Tensor  # [n] int32
    are_drawn: bool  # from the draft logits; if not, they were the only ones possible


class Outcome(NamedTuple):
    chi_square: float
    degrees: int
    acceptance: float
    expected_acceptance: float
    sigmas: float  # of the chi-square statistic
    acceptance_sigmas: float


Drafter = Callable[[Trials], Drafts]


def draw_draft(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choice: Tensor,
    temperature: Tensor,
    target_ids: Tensor | None,
    purpose: int,
) -> Tensor:  # [n] int32
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    keys = DrawKeys(temperature, seeds, positions, choice)
    drawn, _ = draw_tokens(logits, rows, keys, noise=True, scaled=False, purpose=purpose, target_ids=target_ids)
    return drawn.int()


def drawn_with(purpose: int) -> Drafter:
    return lambda trials: Drafts(draw_draft(*trials, purpose=purpose), True)


def looked_up(trials: Trials) -> Drafts:
    """A deterministic drafter: now the one, now another of a few likely tokens."""
    assert trials.target_ids is None
    likely = trials.draft_logits[0].topk(5).indices
    return Drafts(likely[torch.arange(len(trials.seeds), device=likely.device) % 5].int(), False)


def try_many(
    device: str,
    trials: int,
    dtype: torch.dtype,
    draft: Drafter,
    batch_size: int = 512,
    draft_vocab_size: int = VOCAB_SIZE,  # less: the drafter knows only so many tokens, most of them likely ones
) -> Outcome:
    """One position of ``trials`` requests, drafted and judged, against the target's softmax in float64."""
    made = torch.Generator().manual_seed(0)
    target_logits = (2.0 * torch.randn(VOCAB_SIZE, generator=made)).to(dtype)
    draft_logits = TEMPERATURE * (target_logits.float() + torch.randn(VOCAB_SIZE, generator=made))
    liked = target_logits.float() + torch.randn(VOCAB_SIZE, generator=made)
    known = liked.topk(draft_vocab_size).indices.sort().values
    target_ids = known.int().to(device) if draft_vocab_size < VOCAB_SIZE else None
    draft_logits = draft_logits[known]
    expected = target_logits.double().softmax(0)
    draft_probs = torch.zeros(VOCAB_SIZE).double()
    draft_probs[known] = (draft_logits.double() / TEMPERATURE).softmax(0)
    overlap = torch.minimum(expected, draft_probs).sum()  # one less the total variation between the two
    counts, accepted_by_trial, chances = torch.zeros(VOCAB_SIZE, dtype=torch.int64, device=device), [], []
    for first in range(0, trials, batch_size):
        batch = _trials(first, min(batch_size, trials - first), draft_logits.to(device), target_ids)
        drafts = draft(batch)
        accepted, replacement = _judge(target_logits.to(device), batch, drafts)
        counts += torch.bincount(torch.where(accepted, drafts.ids.long(), replacement), minlength=VOCAB_SIZE)
        accepted_by_trial.append(accepted)
        of_draft = expected[drafts.ids.long().cpu()]
        chances.append(overlap.expand(len(accepted)) if drafts.are_drawn else of_draft)
    return _outcome(counts.cpu(), expected * trials, torch.cat(accepted_by_trial).cpu(), torch.cat(chances))


def _trials(first: int, n: int, draft_logits: Tensor, target_ids: Tensor | None) -> Trials:
    device = draft_logits.device
    order = torch.arange(first, first + n, device=device)
    # High words too, some of them negative.
    seeds = torch.stack([order, 0x9E3779B1 * order], dim=1).int()
    positions = (order % 7).int()
    temperature = torch.full((n,), TEMPERATURE, device=device)
    return Trials(draft_logits.expand(n, -1), seeds, positions, torch.zeros_like(positions), temperature, target_ids)


def _judge(target_logits: Tensor, trials: Trials, drafts: Drafts) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(drafts.ids), dtype=torch.int32, device=drafts.ids.device)
    columns = None if trials.target_ids is None else _columns_of(trials.target_ids)
    return judge_drafts(
        target_logits.expand(len(rows), -1),
        DraftTokens(drafts.ids, rows, torch.zeros_like(rows)),
        DrawKeys(trials.temperature, trials.seeds, trials.positions, trials.choice),
        DrawnFrom(trials.draft_logits.unsqueeze(1), columns) if drafts.are_drawn else None,
    )


def _columns_of(target_ids: Tensor) -> Tensor:  # [VOCAB_SIZE] int32
    columns = torch.full((VOCAB_SIZE,), -1, dtype=torch.int32, device=target_ids.device)
    columns[target_ids.long()] = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    return columns


def _outcome(
    counts: Tensor,  # [VOCAB_SIZE] int64
    expected: Tensor,  # [VOCAB_SIZE] float64
    accepted: Tensor,  # [trials] bool
    chances: Tensor,  # [trials] float64: of being accepted
) -> Outcome:
    observed, expected = merged(counts.double(), expected)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    return Outcome(
        chi_square,
        degrees,
        float(accepted.double().mean()),
        float(chances.mean()),
        sigmas=(chi_square - degrees) / math.sqrt(2 * degrees),
        acceptance_sigmas=float((accepted.double() - chances).sum() / (chances * (1 - chances)).sum().sqrt()),
    )


def merged(counts: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Rare bins put together until each is expected often enough for the statistic to be what its name says."""
    order = expected.argsort()
    groups, mass, group = torch.zeros_like(order), 0.0, 0
    for i in order.tolist():
        groups[i] = group
        mass += float(expected[i])
        if mass >= MIN_EXPECTED:
            mass, group = 0.0, group + 1
    # Too little is left for a bin of its own: it joins the one before.
    num_groups = max(1, group)
    groups.clamp_(max=num_groups - 1)
    empty = torch.zeros(num_groups, dtype=torch.float64)
    return empty.index_add(0, groups, counts), empty.index_add(0, groups, expected)
