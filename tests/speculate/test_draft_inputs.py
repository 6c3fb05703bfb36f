"""Inputs of a drafter's passes, against loops over requests."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.plan import RowStatus
from slipstream.speculate.draft_inputs import (
    ShiftedPassInputs,
    find_slots_before,
    prepare_first_pass,
    prepare_shifted_pass,
)
from slipstream.speculate.next_pass_inputs import prepare_next_pass
from tests.bundles import bundle, make_rows

PAGE, MAX_PAGES, MAX_LEN, ROWS, VOCAB = 4, 6, 24, 5, 900
SCRATCH = ROWS - 1


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(counts: list[int], num_padding: int) -> torch.Tensor:
    return torch.tensor([0, *counts, *[0] * num_padding]).cumsum(0).int()


class Drawn:
    """Rows after a commit: most have one token left to compute, some are in the middle of their prompt."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = lambda low, high: data.draw(st.integers(low, high))
        self.rows = data.draw(st.permutations(range(SCRATCH)))[: self.draw(1, SCRATCH)]
        self.pad = self.draw(0, 2)
        self.tokens = [self.draw(3, MAX_LEN - 6) for _ in range(ROWS)]
        self.computed = [n - 1 if data.draw(st.booleans()) else self.draw(1, n - 1) for n in self.tokens]
        self.tokens[SCRATCH] = self.computed[SCRATCH] = 0
        self.step_start = [int(data.draw(st.booleans())) for _ in range(SCRATCH)] + [0]
        self.max_drafts = [self.draw(0, 4) for _ in range(ROWS)]
        self.limits = [n + self.draw(1, 6) for n in self.tokens]
        self.status = [data.draw(st.sampled_from([RowStatus.RUNNING, RowStatus.STOPPED])) for _ in range(ROWS)]
        self.token_ids = torch.randint(1, 1000, (ROWS, MAX_LEN), dtype=torch.int32)
        self.pages = torch.randint(1, 50, (ROWS, MAX_PAGES), dtype=torch.int32)
        self.batch = ints([*self.rows, *[SCRATCH] * self.pad])
        self.state = make_rows(
            token_ids=self.token_ids,
            page_table=self.pages,
            num_computed=ints(self.computed),
            num_tokens=ints(self.tokens),
            max_drafts=ints(self.max_drafts),
            max_total=ints(self.limits),
            status=ints([int(status) for status in self.status]),
            step_start=ints(self.step_start),
        )

    def slot(self, row: int, position: int) -> int:
        return int(self.pages[row, position // PAGE]) * PAGE + position % PAGE


def buffers(num_tokens: int, num_reqs: int) -> dict[str, torch.Tensor]:
    wide = ("positions", "slot_mapping")
    made = {name: torch.full((num_tokens,), -77, dtype=torch.int64) for name in wide}
    made["input_ids"] = torch.full((num_tokens,), -77, dtype=torch.int32)
    small = ("query_lens", "seq_lens", "draft_positions")
    return made | {name: torch.full((num_reqs,), -77, dtype=torch.int32) for name in small}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_first_pass_of_a_draft_model(data: st.DataObject) -> None:
    d = Drawn(data)
    known = [d.draw(1, d.computed[r]) for r in d.rows]
    # Some go further back than the step, for which each has slots.
    most_back = d.draw(0, 3)
    back = [min(d.draw(0, most_back), d.computed[r] - n) for r, n in zip(d.rows, known, strict=True)]
    begins = [d.computed[r] - n - b if b else -1 for r, n, b in zip(d.rows, known, back, strict=True)]
    planned = [n + 1 + most_back for n in known]
    out = buffers(sum(planned) + d.draw(0, 3), len(d.batch))
    out["last_indices"] = torch.full((len(d.batch),), -77, dtype=torch.int64)
    out["block_table"] = torch.full((len(d.batch), MAX_PAGES), -77, dtype=torch.int32)
    inputs = bundle(prepare_first_pass, out)["inputs"]
    first_slots = ints([*begins, *[-1] * d.pad])
    prepare_first_pass(d.state, d.batch, starts_of(planned, d.pad), first_slots, most_back, PAGE, VOCAB, inputs)

    def padding_id(token: int) -> int:
        return int(d.token_ids[SCRATCH, token % MAX_LEN])

    at = 0
    for i, (row, count) in enumerate(zip(d.rows, known, strict=True)):
        runs = d.step_start[row] and d.max_drafts[row] > 0
        has_new = d.computed[row] + 1 == d.tokens[row]
        first, alive = d.computed[row] - count - back[i], (count + back[i] + has_new) if runs else 0
        for t in range(planned[i]):
            token = int(d.token_ids[row, first + t]) if t < alive else padding_id(at + t)
            assert out["input_ids"][at + t] == (token if token < VOCAB else 0)
            assert out["positions"][at + t] == (first + t if t < alive else 0)
            assert out["slot_mapping"][at + t] == (d.slot(row, first + t) if t < alive else -1)
        assert out["query_lens"][i] == alive
        assert out["seq_lens"][i] == (first + alive if runs else 0)
        assert out["last_indices"][i] == (at + alive - 1 if runs else 0)
        assert out["draft_positions"][i] == d.tokens[row]
        at += planned[i]
    assert torch.equal(out["block_table"], d.pages[d.batch.long()])
    padding = [padding_id(token) for token in range(at, len(out["input_ids"]))]
    assert out["input_ids"][at:].tolist() == [token if token < VOCAB else 0 for token in padding]
    assert (out["slot_mapping"][at:] == -1).all()
    assert not out["query_lens"][len(known) :].any() and not out["last_indices"][len(known) :].any()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_pass_over_the_targets_tokens_moved_on_by_one(data: st.DataObject) -> None:
    d = Drawn(data)
    known = [d.draw(1, d.computed[r]) for r in d.rows]
    counts = [n + d.draw(0, 3) for n in known]  # and slots of rejected or missing drafts
    begins = starts_of(counts, d.pad)
    positions = torch.zeros(sum(counts) + d.draw(0, 3), dtype=torch.int64)
    for i, row in enumerate(d.rows):
        positions[begins[i]] = d.computed[row] - known[i]  # of later ones nothing is asked: they may be unused
    out = {
        "input_ids": torch.full((len(positions),), -77, dtype=torch.int32),
        "last_indices": torch.full((len(d.batch),), -77, dtype=torch.int64),
        "draft_positions": torch.full((len(d.batch),), -77, dtype=torch.int32),
        "block_table": torch.full((len(d.batch), MAX_PAGES), -77, dtype=torch.int32),
    }
    prepare_shifted_pass(d.state, d.batch, begins, positions, ShiftedPassInputs(**out))
    for i, row in enumerate(d.rows):
        first, at = d.computed[row] - known[i], int(begins[i])
        for t in range(counts[i]):
            there = d.step_start[row] and first + t + 1 < d.tokens[row]
            assert out["input_ids"][at + t] == (d.token_ids[row, first + t + 1] if there else 0)
        # The token after the last that was computed: the new one, or the next of the prompt.
        assert out["last_indices"][i] == (at + known[i] - 1 if d.step_start[row] else 0)
        assert out["draft_positions"][i] == d.tokens[row]
    assert not out["input_ids"][sum(counts) :].any()
    assert torch.equal(out["block_table"], d.pages[d.batch.long()])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_where_the_tokens_before_lie(data: st.DataObject) -> None:
    d = Drawn(data)
    alive = [d.draw(0, 4) for _ in d.rows]
    counts = [n + d.draw(0, 2) for n in alive]  # and unused ones
    firsts = [d.draw(0, MAX_LEN - 6) for _ in d.rows]
    begin_at = [d.draw(0, first + 2) for first in firsts] + [0] * d.pad  # where the drafter's keys do
    begins = starts_of(counts, d.pad)
    positions = torch.zeros(sum(counts) + d.draw(0, 3), dtype=torch.int64)
    expected = torch.zeros_like(positions)
    for i, row in enumerate(d.rows):
        for t in range(alive[i]):
            positions[begins[i] + t] = firsts[i] + t
            if firsts[i] + t > begin_at[i]:
                expected[begins[i] + t] = d.slot(row, firsts[i] + t - 1)
    found = torch.full_like(positions, -77)
    find_slots_before(begins, positions, d.pages[d.batch.long()], ints(begin_at), PAGE, slots_before=found)
    assert torch.equal(found, expected)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_passes_after_the_first(data: st.DataObject) -> None:
    d = Drawn(data)
    idx, slots_before = d.draw(1, 3), d.draw(0, 1)
    before = [d.draw(-1, 9) for _ in d.batch]
    out = buffers(len(d.batch), len(d.batch))
    inputs = bundle(prepare_next_pass, out)["inputs"]
    prepare_next_pass(d.state, d.batch, idx, ints(before), PAGE, slots_before, inputs)
    for i, row in enumerate(d.batch.tolist()):
        length = d.tokens[row]
        runs = d.status[row] == RowStatus.RUNNING and d.computed[row] + 1 == length and before[i] >= 0
        runs = runs and idx < d.max_drafts[row] and idx < d.limits[row] - length - 1
        position = length + idx - 1 - slots_before
        assert out["input_ids"][i] == (before[i] if runs else 0)
        assert out["positions"][i] == (position if runs else 0)
        assert out["slot_mapping"][i] == (d.slot(row, position) if runs else -1)
        assert out["query_lens"][i] == runs
        assert out["seq_lens"][i] == (position + 1 if runs else 0)
        assert out["draft_positions"][i] == length + idx
