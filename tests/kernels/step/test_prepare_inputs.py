from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.step.prepare_inputs import BatchLayout, StepInputs, TokenInputs, prepare_inputs
from slipstream.plan import RowStatus
from tests.bundles import bundle, make_rows

PAGE, MAX_PAGES, MAX_LEN, ROWS, MOST_DRAFTS = 4, 5, 20, 6, 3
SCRATCH = ROWS - 1
POISON = 0x7FF17FF1


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(counts: list[int], num_padding: int) -> torch.Tensor:
    starts = [0]
    for n in counts:
        starts.append(starts[-1] + n)
    return ints(starts + [starts[-1]] * num_padding)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_requests(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    rows = data.draw(st.permutations(range(SCRATCH)))[: draw(1, SCRATCH)]
    pad_reqs = draw(0, ROWS - len(rows))
    computed, tokens, drafts = [0] * ROWS, [0] * ROWS, [0] * ROWS
    status = [int(RowStatus.INERT)] * ROWS
    known, draft_slots = [], []  # of each request: known tokens in the step, draft slots after them
    for row in rows:
        known.append(draw(1, 6))
        computed[row] = draw(0, MAX_LEN - MOST_DRAFTS - known[-1])
        reaches_end = data.draw(st.booleans())
        tokens[row] = computed[row] + known[-1] if reaches_end else draw(computed[row] + known[-1] + 1, MAX_LEN)
        draft_slots.append(draw(0, MOST_DRAFTS) if reaches_end else 0)
        drafts[row] = draw(0, MOST_DRAFTS)
        status[row] = data.draw(st.sampled_from([RowStatus.RUNNING, RowStatus.RUNNING, RowStatus.STOPPED]))
    token_ids = torch.randint(1, 1000, (ROWS, MAX_LEN), dtype=torch.int32)
    page_table = torch.randint(1, 50, (ROWS, MAX_PAGES), dtype=torch.int32)
    page_table[SCRATCH] = 0
    planned = [a + b for a, b in zip(known, draft_slots, strict=True)]
    num_tokens, num_logits = sum(planned) + draw(0, 4), len(rows) + sum(draft_slots) + draw(0, 4)

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=dtype)

    out = {
        "input_ids": buffer(num_tokens),
        "positions": buffer(num_tokens, dtype=torch.int64),
        "slot_mapping": buffer(num_tokens, dtype=torch.int64),
        "query_lens": buffer(len(rows) + pad_reqs),
        "seq_lens": buffer(len(rows) + pad_reqs),
        "block_table": buffer(len(rows) + pad_reqs, MAX_PAGES),
        "logit_indices": buffer(num_logits, dtype=torch.int64),
        "logit_rows": buffer(num_logits),
        "logit_positions": buffer(num_logits),
        "logit_drafts": buffer(num_logits),
    }
    columns = {
        "token_ids": token_ids,
        "page_table": page_table,
        "num_computed": ints(computed),
        "num_tokens": ints(tokens),
        "num_drafts": ints(drafts),
        "status": ints(status),
    }
    layout = {
        "batch_rows": ints([*rows, *[SCRATCH] * pad_reqs]),
        "query_start_loc": starts_of(planned, pad_reqs),
        "logit_start_loc": starts_of([n + 1 for n in draft_slots], pad_reqs),
    }
    sizes = {"page_size": PAGE, "max_logits": MOST_DRAFTS + 1}
    prepare_inputs(**bundle(prepare_inputs, columns | layout | sizes | out))

    expected: dict[str, list[int]] = {name: [] for name in out}
    for row, num_known, num_draft_slots in zip(rows, known, draft_slots, strict=True):
        runs = status[row] == RowStatus.RUNNING
        num_drafts = min(drafts[row], num_draft_slots) if runs else 0
        alive = num_known + num_drafts if runs else 0
        for offset in range(num_known + num_draft_slots):
            pos, is_alive = computed[row] + offset, offset < alive
            if offset >= num_known - 1:
                draft_idx = offset - (num_known - 1)
                is_draft = draft_idx < num_drafts
                expected["logit_indices"].append(len(expected["input_ids"]))
                expected["logit_rows"].append(row)
                expected["logit_positions"].append(tokens[row] + min(draft_idx, num_drafts))
                expected["logit_drafts"].append(int(token_ids[row, pos + 1]) if is_draft else -1)
            padding_id = int(token_ids[SCRATCH, len(expected["input_ids"]) % MAX_LEN])
            expected["input_ids"].append(int(token_ids[row, pos]) if is_alive else padding_id)
            expected["positions"].append(pos if is_alive else 0)
            expected["slot_mapping"].append(int(page_table[row, pos // PAGE]) * PAGE + pos % PAGE if is_alive else -1)
        expected["query_lens"].append(alive)
        expected["seq_lens"].append(computed[row] + alive if runs else 0)
    # Law 6: a graph's inputs are full up to the padded size.
    expected["input_ids"] += [
        int(token_ids[SCRATCH, i % MAX_LEN]) for i in range(len(expected["input_ids"]), num_tokens)
    ]
    padding = {"slot_mapping": -1, "logit_rows": SCRATCH, "logit_drafts": -1}
    for name, values in expected.items():
        if name != "block_table":
            assert out[name].tolist() == values + [padding.get(name, 0)] * (len(out[name]) - len(values)), name
    assert torch.equal(out["block_table"][: len(rows)], page_table[list(rows)])
    assert not out["block_table"][len(rows) :].any()


def test_tokens_beyond_the_known_ones_are_dead() -> None:
    """A row that has fewer tokens than the plan assumed computes nothing for the rest."""
    ones = torch.ones(2, dtype=torch.int32)
    rows = make_rows(
        token_ids=torch.arange(10, dtype=torch.int32).view(2, 5) + 100,
        page_table=torch.tensor([[9, 8], [0, 0]], dtype=torch.int32),
        num_computed=ones,
        num_tokens=ones * 3,
        num_drafts=ones * 0,
        status=ones * int(RowStatus.RUNNING),
    )
    tokens = TokenInputs(ints([0] * 3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    table, one_long = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    inputs = StepInputs(tokens, ints([0]), ints([0]), table, one_long, ints([0]), ints([0]), ints([0]))
    prepare_inputs(rows, BatchLayout(ints([0]), ints([0, 3]), ints([0, 1])), 4, 1, inputs)
    assert [t.tolist() for t in tokens] == [[101, 102, 107], [1, 2, 0], [37, 38, -1]], "the last is the scratch row's"
    assert (inputs.query_lens.tolist(), inputs.seq_lens.tolist()) == ([2], [3])
