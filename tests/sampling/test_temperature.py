from __future__ import annotations

import torch

from slipstream.sampling.temperature import apply_temperature


def test_divides_and_leaves_greedy_rows_alone() -> None:
    logits = torch.randn(3, 20)
    out = apply_temperature(logits, torch.tensor([0.5, 0.0, 2.0]))
    assert torch.equal(out, torch.stack([logits[0] * 2, logits[1], logits[2] / 2]))
