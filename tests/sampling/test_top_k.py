from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper

from slipstream.sampling.top_k import apply_top_k


@pytest.mark.parametrize("ties", [False, True])
def test_equals_transformers(ties: bool) -> None:
    logits = torch.randint(-4, 4, (6, 40)).float() if ties else torch.randn(6, 40)
    top_k = [0, 1, 3, 40, 39, 1000]
    out = apply_top_k(logits, torch.tensor(top_k, dtype=torch.int32))
    for row, k in enumerate(top_k):
        alone = logits[row : row + 1]
        expected = TopKLogitsWarper(k)(torch.empty(0), alone) if k else alone
        assert torch.equal(out[row : row + 1], expected)
