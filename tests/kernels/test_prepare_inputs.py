from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.prepare_inputs import prepare_inputs
from slipstream.types import RowStatus

PAGE, MAX_PAGES, MAX_LEN, ROWS = 4, 5, 20, 6
SCRATCH = ROWS - 1
POISON = 0x7FF17FF1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_requests(data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(SCRATCH)))[: data.draw(st.integers(1, SCRATCH))]
    query_lens = [data.draw(st.integers(1, 6)) for _ in rows]
    padded_reqs = data.draw(st.integers(len(rows), ROWS))
    padded_tokens = sum(query_lens) + data.draw(st.integers(0, 4))
    computed, tokens = [0] * ROWS, [0] * ROWS
    status = [int(RowStatus.INERT)] * ROWS
    for row, query_len in zip(rows, query_lens, strict=True):
        computed[row] = data.draw(st.integers(0, MAX_LEN - query_len))
        tokens[row] = data.draw(st.integers(computed[row] + query_len, MAX_LEN))
        status[row] = data.draw(st.sampled_from([RowStatus.RUNNING, RowStatus.RUNNING, RowStatus.STOPPED]))
    token_ids = torch.randint(1, 1000, (ROWS, MAX_LEN), dtype=torch.int32)
    page_table = torch.randint(1, 50, (ROWS, MAX_PAGES), dtype=torch.int32)
    page_table[SCRATCH] = 0

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=dtype)

    out = {
        "input_ids": buffer(padded_tokens),
        "positions": buffer(padded_tokens, dtype=torch.int64),
        "slot_mapping": buffer(padded_tokens, dtype=torch.int64),
        "seq_lens": buffer(padded_reqs),
        "last_token_indices": buffer(padded_reqs, dtype=torch.int64),
        "block_table": buffer(padded_reqs, MAX_PAGES),
    }
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    starts += [starts[-1]] * (padded_reqs - len(rows))
    prepare_inputs(
        torch.tensor([*rows, *[SCRATCH] * (padded_reqs - len(rows))], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        token_ids,
        page_table,
        torch.tensor(computed, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(status, dtype=torch.int32),
        PAGE,
        **out,
    )

    ids, positions, slots, seq_lens, last = [], [], [], [], []
    for row, query_len in zip(rows, query_lens, strict=True):
        runs = status[row] == RowStatus.RUNNING
        for offset in range(query_len):
            pos = computed[row] + offset if runs else 0
            ids.append(int(token_ids[row, pos]) if runs else 0)
            positions.append(pos)
            slots.append(int(page_table[row, pos // PAGE]) * PAGE + pos % PAGE if runs else -1)
        seq_lens.append(computed[row] + query_len if runs else 0)
        last.append(len(ids) - 1)
    pad_tokens, pad_reqs = padded_tokens - len(ids), padded_reqs - len(rows)
    # Law 6: a graph's inputs are full up to the padded size.
    assert out["input_ids"].tolist() == ids + [0] * pad_tokens
    assert out["positions"].tolist() == positions + [0] * pad_tokens
    assert out["slot_mapping"].tolist() == slots + [-1] * pad_tokens
    assert out["seq_lens"].tolist() == seq_lens + [0] * pad_reqs
    assert out["last_token_indices"].tolist() == last + [0] * pad_reqs
    assert torch.equal(out["block_table"][: len(rows)], page_table[list(rows)])
    assert not out["block_table"][len(rows) :].any()


def test_tokens_beyond_the_known_ones_are_dead() -> None:
    """A row that has fewer tokens than the plan assumed computes nothing for the rest."""
    out = [torch.zeros(3, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int64)]
    per_req = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)]
    ones = torch.ones(2, dtype=torch.int32)
    prepare_inputs(
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.arange(10, dtype=torch.int32).view(2, 5) + 100,
        torch.tensor([[9, 8], [0, 0]], dtype=torch.int32),
        ones,  # one token computed
        ones * 3,  # three known
        ones * 0,
        4,
        *out,
        *per_req,
        torch.zeros(1, 2, dtype=torch.int32),
    )
    assert [t.tolist() for t in out] == [[101, 102, 0], [1, 2, 0], [37, 38, -1]]
