from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

from slipstream.sampling.top_p import apply_top_p


def test_equals_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 60, dtype=torch.float64) * 3
    top_p = [1.0, 0.999, 0.9, 0.5, 0.2, 1e-6, 0.7]
    out = apply_top_p(logits, torch.tensor(top_p))
    for row, p in enumerate(top_p):
        alone = logits[row : row + 1]
        expected = TopPLogitsWarper(p)(torch.empty(0), alone) if p < 1 else alone
        assert torch.equal(out[row : row + 1], expected)


def test_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    assert torch.isfinite(apply_top_p(logits, torch.tensor([0.65]))).tolist() == [[False, True, True, False]]
    assert torch.isfinite(apply_top_p(logits, torch.tensor([0.75]))).tolist() == [[False, True, True, True]]


def test_of_equal_tokens_the_lowest_ids_stay() -> None:
    out = apply_top_p(torch.zeros(1, 10), torch.tensor([0.25]))
    assert torch.isfinite(out).nonzero()[:, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_logits_of_few_bits_are_summed_in_many(dtype: torch.dtype) -> None:
    """A sum of a thousand small numbers in bfloat16 stops growing at a few hundred of them."""
    logits = (0.5 * torch.randn(1, 5000)).to(dtype)
    reached = logits.double().softmax(1).sort(descending=True).values.cumsum(1)[0]
    for count in (50, 1000, 3000):
        p = (reached[count - 2] + reached[count - 1]).float() / 2
        kept = torch.isfinite(apply_top_p(logits, p.unsqueeze(0)))
        # Near a sum that is p to the seventh digit one token more or less is as right.
        assert abs(int(kept.sum()) - count) <= 1
