from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.step.commit import NUM_HEADER_COLUMNS, CheckedTokens, commit
from slipstream.kernels.step.prepare_inputs import BatchLayout
from slipstream.plan import RowStatus
from tests.bundles import make_rows

ROWS, MAX_LEN, STOPS, WIDTH = 5, 12, 3, 4
SCRATCH = ROWS - 1


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_rows(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    batch = data.draw(st.permutations(range(SCRATCH)))[: draw(1, SCRATCH)]
    padding = draw(0, 2)
    tokens = [draw(1, MAX_LEN - 1) for _ in range(ROWS)]
    computed = [draw(0, n - 1) for n in tokens]
    limits = [draw(tokens[r] + 1, MAX_LEN) for r in range(ROWS)]
    drafts = [draw(0, 3) for _ in range(ROWS)]
    status = [data.draw(st.sampled_from([0, 0, 0, int(RowStatus.STOPPED)])) for _ in range(ROWS)]
    status[SCRATCH] = int(RowStatus.INERT)
    stops = [[draw(-1, 5) for _ in range(STOPS)] for _ in range(ROWS)]
    known = [draw(1, tokens[r] - computed[r]) for r in batch]
    # Of a row that reaches its end: draft slots, drafts that exist, accepted drafts.
    draft_slots = [draw(0, WIDTH - 1) if computed[r] + n == tokens[r] else 0 for r, n in zip(batch, known, strict=True)]
    there = [draw(0, n) for n in draft_slots]
    accepted = [draw(0, n) for n in there]
    new_ids = [[draw(0, 5) for _ in range(WIDTH)] for _ in range(len(batch) + padding)]
    failed = [data.draw(st.integers(0, 3)) == 0 and i < len(batch) for i in range(len(new_ids))]
    history = torch.randint(0, 6, (ROWS, MAX_LEN), dtype=torch.int32)
    num_logits = len(batch) + sum(draft_slots)
    forced = [data.draw(st.booleans()) for _ in range(num_logits)] if data.draw(st.booleans()) else None

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    device = {"token_ids": history.clone(), "num_computed": ints(computed), "num_tokens": ints(tokens)}
    device |= {
        "num_drafts": ints(drafts),
        "status": ints(status),
        "step_start": torch.full((ROWS,), 7, dtype=torch.int32),
    }
    device["out"] = torch.full((len(new_ids), NUM_HEADER_COLUMNS + WIDTH), 77, dtype=torch.int32)
    planned = [a + b for a, b in zip(known, draft_slots, strict=True)]
    alive = [a + b if status[r] == 0 else 0 for r, a, b in zip(batch, known, there, strict=True)]

    def starts(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()

    checked = CheckedTokens(
        ints([t for row in new_ids for t in row]).view(-1, WIDTH),
        ints([*accepted, *[0] * padding]),
        torch.tensor(failed),
        None if forced is None else torch.tensor(forced),
    )
    out = device.pop("out")
    rows = make_rows(
        stop_ids=ints([s for row in stops for s in row]).view(ROWS, STOPS), max_total=ints(limits), **device
    )
    layout = BatchLayout(ints([*batch, *[SCRATCH] * padding]), starts(planned), starts([n + 1 for n in draft_slots]))
    commit(checked, rows, layout, ints([*alive, *[0] * padding]), out)
    device["out"] = out

    expected_out = []
    step_start = [7] * ROWS
    step_start[SCRATCH] = 0 if padding else 7
    for i, row in enumerate(batch):
        step_start[row] = 1 + computed[row] if status[row] == RowStatus.RUNNING else 0
        taken: list[int] = []
        num_checked = num_accepted = would_accept = 0
        if status[row] == RowStatus.RUNNING:
            has_draft, drafts[row] = drafts[row] > 0 and draft_slots[i] == 0, 0
            computed[row] += known[i]
            if computed[row] == tokens[row]:
                num_checked = there[i]
                is_right = (
                    int(history[row, tokens[row]]) == new_ids[i][0]
                    if forced is None
                    else forced[i + sum(draft_slots[:i])]
                )
                would_accept = int(has_draft and is_right and not failed[i])
                stops_first = any(t in stops[row] for t in new_ids[i][: min(accepted[i], limits[row] - tokens[row])])
                if failed[i] and not stops_first:
                    status[row] = int(RowStatus.ERROR)
                for idx in range(0 if failed[i] and not stops_first else accepted[i] + 1):
                    taken.append(new_ids[i][idx])
                    history[row, tokens[row]] = taken[-1]
                    tokens[row] += 1
                    num_accepted += idx < accepted[i]
                    if taken[-1] in stops[row]:
                        status[row] = int(RowStatus.STOPPED)
                        break
                    if tokens[row] >= limits[row]:
                        status[row] = int(RowStatus.LENGTH)
                        break
                computed[row] += max(0, len(taken) - 1)
        expected_out.append(
            [status[row], num_checked, num_accepted, would_accept, *taken, *[-1] * (WIDTH - len(taken))]
        )
    expected_out += [[int(RowStatus.INERT), 0, 0, 0, *[-1] * WIDTH]] * padding
    assert device["out"].tolist() == expected_out
    assert device["num_computed"].tolist() == computed
    assert device["num_tokens"].tolist() == tokens
    assert device["num_drafts"].tolist() == drafts
    assert device["status"].tolist() == status
    assert device["step_start"].tolist() == step_start
    assert torch.equal(device["token_ids"], history)
