from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.commit import commit
from slipstream.types import RowStatus

ROWS, MAX_LEN, STOPS = 5, 8, 3
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
    status = [data.draw(st.sampled_from([0, 0, 0, int(RowStatus.STOPPED)])) for _ in range(ROWS)]
    status[SCRATCH] = int(RowStatus.INERT)
    stops = [[draw(-1, 5) for _ in range(STOPS)] for _ in range(ROWS)]
    query = [draw(1, tokens[r] - computed[r]) for r in batch]
    sampled = [draw(0, 5) for _ in range(len(batch) + padding)]
    failed = [data.draw(st.booleans()) if i < len(batch) else False for i in range(len(sampled))]
    history = torch.randint(10, 99, (ROWS, MAX_LEN), dtype=torch.int32)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    device = {"token_ids": history.clone(), "num_computed": ints(computed), "num_tokens": ints(tokens)}
    device |= {"status": ints(status), "out": torch.full((len(sampled), 2), 77, dtype=torch.int32)}
    starts = torch.tensor([0, *query, *[0] * padding]).cumsum(0).int()
    commit(
        torch.tensor(sampled),
        torch.tensor(failed),
        ints([*batch, *[SCRATCH] * padding]),
        starts,
        ints([s for row in stops for s in row]).view(ROWS, STOPS),
        ints(limits),
        **device,
    )

    expected_out = []
    for i, row in enumerate(batch):
        new = -1
        if status[row] == RowStatus.RUNNING:
            computed[row] += query[i]
            if computed[row] == tokens[row]:
                if failed[i]:
                    status[row] = int(RowStatus.ERROR)
                else:
                    new = sampled[i]
                    history[row, tokens[row]] = new
                    tokens[row] += 1
                    if new in stops[row]:
                        status[row] = int(RowStatus.STOPPED)
                    elif tokens[row] >= limits[row]:
                        status[row] = int(RowStatus.LENGTH)
        expected_out.append([new, status[row]])
    expected_out += [[-1, int(RowStatus.INERT)]] * padding
    assert device["out"].tolist() == expected_out
    assert device["num_computed"].tolist() == computed
    assert device["num_tokens"].tolist() == tokens
    assert device["status"].tolist() == status
    assert torch.equal(device["token_ids"], history)
