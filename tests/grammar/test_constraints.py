"""The host's side of masks: the pool by content, drafts of the host, ends that are held back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.grammar.constraints import Constraints, MaskLimits
from slipstream.grammar.mask_pool import MaskPool
from slipstream.grammar.walk import only_token
from slipstream.plan import HostDraft, RowStatus, ScheduledRequest, StepPlan, StepResult
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.speculate.place_host_drafts import place_host_drafts
from tests.bundles import make_rows
from tests.sim import toy_grammar
from tests.sim.hash_model import VOCAB_SIZE

END = toy_grammar.END


def test_the_pool_keeps_each_mask_once_and_gives_away_what_was_not_used() -> None:
    rng, pool, device = random.Random(1), MaskPool(6), np.full((6, 2), -7)
    for _ in range(300):
        masks = np.array([[rng.randrange(9), 5] for _ in range(rng.randint(0, 6))], dtype=np.int32).reshape(-1, 2)
        placed = pool.place(masks)
        assert (
            len(set(placed.destinations)) == len(placed.destinations) == len({masks[i].tobytes() for i in placed.new})
        )
        device[placed.destinations] = masks[placed.new]
        assert (device[placed.rows] == masks).all()
    repeated = np.array([[3, 3], [3, 3]], dtype=np.int32)
    assert len(pool.place(repeated).new) <= 1 and not pool.place(repeated).new


def make_request(**params: Any) -> Request:
    chosen = {"temperature": 0.0, "seed": 0, "structured": toy_grammar.structure(3), **params}
    sampling = SamplingParams(**chosen).with_defaults(SamplingParams())
    return Request("r", (1, 2), sampling, (END,), 40)


def open_constraints(request: Request) -> Constraints:
    limits = MaskLimits(VOCAB_SIZE, 16, 16, num_drafts=3)
    constraints = Constraints(toy_grammar.ToyGrammars(), toy_grammar.LateThreads(3), limits, (END,))
    constraints.add(request)
    while constraints.is_compiling:
        assert all(not error for _, error in constraints.take_compiled(1.0))
    return constraints


def plan_of(num_drafts: int, *host_drafts: HostDraft) -> StepPlan:
    scheduled = ScheduledRequest("r", 1, 0, 1 + num_drafts, 2, True, num_drafts)
    plan = StepPlan.from_requests(0, [scheduled])
    plan.host_drafts = host_drafts
    return plan


def collect(constraints: Constraints, token_ids: list[int], drafts: list[int]) -> None:
    result = StepResult(plan_of(0), [token_ids], [RowStatus.RUNNING], [0], [0], [0], next_drafts=[drafts])
    constraints.note_result(result)


def masks_of(constraints: Constraints, plan: StepPlan, pool: np.ndarray[Any, Any]) -> list[set[int] | None]:
    """Per logit; None where every token is allowed."""
    constraints.begin(plan)
    while (filled := constraints.take_masks(1.0)) is None:
        pass
    assert not filled.errors
    pool[list(filled.masks.destinations)] = filled.masks.words
    bits = [np.flatnonzero(np.unpackbits(pool[r].view(np.uint8), bitorder="little")) for r in filled.masks.rows]
    return [None if r < 0 else set(own.tolist()) for r, own in zip(filled.masks.rows, bits, strict=True)]


def walk(token_ids: list[int]) -> list[set[int]]:
    """What is legal after each of these tokens, and before the first."""
    state = toy_grammar.first_state(toy_grammar.structure(3))
    found = [toy_grammar.legal(state)]
    for token_id in token_ids:
        state = toy_grammar.next_state(state, token_id)
        found.append(toy_grammar.legal(state))
    return found


def test_masks_follow_tokens_and_legal_drafts_and_go_back() -> None:
    rng, request = random.Random(2), make_request()
    constraints, pool = open_constraints(request), np.zeros((16, 2), dtype=np.int32)
    output: list[int] = []
    for _ in range(12):
        legal = walk(output)[-1] - {END}
        if not legal:
            break
        output.append(rng.choice(sorted(legal)))
        drafts = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
        if legal := walk(output)[-1] - {END}:
            drafts[:1] = [rng.choice(sorted(legal))]
        collect(constraints, output[-1:], drafts)
        found = masks_of(constraints, plan_of(3), pool)
        expected = walk(output + drafts)[len(output) :]
        for idx, mask in enumerate(found):
            is_reached = idx <= len(drafts) and all(drafts[i] in expected[i] and drafts[i] != END for i in range(idx))
            assert mask == (expected[idx] if is_reached else None)
    assert len(output) > 3


def test_the_only_token_of_a_mask() -> None:
    for token_id in (0, 31, 32, 63):
        mask = np.zeros(2, dtype=np.uint32)
        mask[token_id // 32] = 1 << token_id % 32
        assert only_token(mask.view(np.int32)) == token_id
        for other in (0, 31, 32, 63):
            both = mask.copy()
            both[other // 32] |= np.uint32(1 << other % 32)
            assert only_token(both.view(np.int32)) == (token_id if other == token_id else None)
    assert only_token(np.zeros(2, dtype=np.int32)) is None


def test_tokens_that_are_certain_come_after_the_accepted_drafts() -> None:
    """Where the token after the last legal draft is the only one, those after it are drafts, as far as they are."""
    rng, lengths = random.Random(5), set()
    for _ in range(400):
        constraints, output = open_constraints(make_request()), list[int]()
        while len(output) < rng.randint(0, 9) and (legal := walk(output)[-1] - {END}):
            output.append(rng.choice(sorted(legal)))
        collect(constraints, output, [])
        drafts = list[int]()
        while len(drafts) < rng.randint(0, 2) and (legal := walk(output + drafts)[-1] - {END}):
            drafts.append(rng.choice(sorted(legal)))
        constraints._states["r"].drafts = drafts
        num_next = rng.randint(0, 3)
        plan = plan_of(3)
        plan.composition = replace(plan.composition, num_next_drafts=num_next)
        constraints.begin(plan)
        while (filled := constraints.take_masks(1.0)) is None:
            pass
        passed, expected = [*output, *drafts], list[int]()
        while len(allowed := walk(passed)[-1]) == 1 and allowed != {END} and len(expected) <= num_next:
            expected += allowed
            passed += allowed
        ends = [END] if allowed == {END} and expected and len(expected) <= num_next else []
        expected = [*expected, *ends][1 : 1 + num_next]
        found = [(run.place, run.num_accepted, run.token_ids) for run in filled.masks.runs]
        assert found == ([(0, len(drafts), expected)] if expected else [])
        lengths.add(len(expected))
    assert lengths >= {0, 1, 2}


@pytest.mark.parametrize("params", [{"min_tokens": 40}, {"ignore_eos": True}])
def test_an_end_is_held_back_unless_nothing_else_is_legal(params: dict[str, Any]) -> None:
    request = make_request(**params)
    constraints, pool = open_constraints(request), np.zeros((16, 2), dtype=np.int32)
    output: list[int] = []
    for _ in range(20):
        (mask,) = masks_of(constraints, plan_of(0), pool)
        legal = walk(output)[-1]
        assert mask == (legal - {END} or legal)
        if mask == {END}:
            break
        output.append(min(mask))
        collect(constraints, output[-1:], [])


def test_drafts_of_the_host_are_those_that_the_device_places() -> None:
    rng = random.Random(4)
    for _ in range(300):
        request = make_request(max_k=rng.choice([None, 1]))
        constraints, output = open_constraints(request), [5, 6, 7][: rng.randint(0, 3)]
        collect(constraints, output, [])
        known = [1, 2, *output]
        first = rng.randint(1, len(known))
        ids = [*known[first:], *(rng.randrange(9) for _ in range(4))][: rng.randint(1, 6)]
        if rng.random() < 0.2:
            ids[0] = 60
        max_total = rng.choice([40, len(known) + 2, len(known) + 1])
        request = Request("r", (1, 2), request.params, (END,), max_total)
        state = constraints._states["r"]
        state.request = request
        constraints._place_staged(state, HostDraft(0, first, ids))
        column = {name: torch.tensor([value], dtype=torch.int32) for name, value in _row(known, request).items()}
        token_ids = torch.tensor([[*known, *[0] * 12]], dtype=torch.int32)
        rows = make_rows(token_ids=token_ids, **column)
        staged = torch.tensor([[first, len(ids), *ids, *[0] * (8 - len(ids))]], dtype=torch.int32)
        place_host_drafts(staged, rows, 3)
        count = int(rows.num_drafts[0])
        assert list(state.drafts)[:3] == rows.token_ids[0, len(known) : len(known) + count].tolist()


def _row(known: list[int], request: Request) -> dict[str, int]:
    length = len(known)
    numbers = {"num_tokens": length, "num_computed": length - 1, "num_drafts": 0, "status": int(RowStatus.RUNNING)}
    return {**numbers, "max_drafts": request.num_drafts(3), "max_total": request.max_total_tokens}
