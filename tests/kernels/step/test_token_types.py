"""Types of the tokens of pairs, counted by hand; rows at rest and single texts have none."""

from __future__ import annotations

import torch

from slipstream.kernels.step.token_types import TypedRequests, token_types


def test_types_of_pairs() -> None:
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 9])
    rows, starts = torch.tensor([2, 0, 1]).int(), torch.tensor([0, 4, 6, 9]).int()
    lens, second_from = torch.tensor([4, 2, 0]).int(), torch.tensor([0, 1, 3]).int()
    out = torch.full((10,), 7, dtype=torch.int32)
    token_types(TypedRequests(positions, rows, starts, lens), second_from, out)
    assert out.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
