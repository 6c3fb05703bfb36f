from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.sampling.sampler import SamplingNeeds, process
from slipstream.sampling.top_n_sigma import apply_top_n_sigma
from slipstream.sampling_params import SamplingParams
from tests.sampling.rows import make_request, make_rows

VOCAB = 60


def expected(row: torch.Tensor, n: float) -> torch.Tensor:
    """By numpy's deviation, over the tokens that are not forbidden."""
    values = row.double().numpy()
    allowed = values[np.isfinite(values)]
    if not n or not len(allowed):
        return row
    return row.masked_fill(torch.from_numpy(values < allowed.max() - n * np.std(allowed)), -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_equals_numpy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(7, VOCAB) * 3).to(dtype)
    logits[:, ::5] = -torch.inf
    logits[4] = -torch.inf
    n = [0.0, 0.5, 1.0, 2.0, 1.0, 0.01, 100.0]
    out = apply_top_n_sigma(logits, torch.tensor(n))
    for row, own in enumerate(n):
        assert torch.equal(out[row], expected(logits[row], own)), own
    counts = torch.isfinite(out).sum(1).tolist()
    assert counts[5] == 1 and counts[4] == 0 and counts[6] == counts[0] == VOCAB - VOCAB // 5
    assert 1 < counts[1] <= counts[2] + 3


def test_what_is_forbidden_does_not_widen_the_spread() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0, -1.0, -1e9]], dtype=torch.float64)
    one = torch.tensor([1.0])
    assert torch.isfinite(apply_top_n_sigma(logits, one)).tolist() == [[True, True, True, True, False]]
    logits[0, 4] = -torch.inf
    assert torch.isfinite(apply_top_n_sigma(logits, one)).tolist() == [[True, True, False, False, False]]


def test_far_from_zero_no_digit_is_lost() -> None:
    torch.manual_seed(1)
    logits = torch.randint(-60, 60, (1, 4000)).float()
    kept = torch.isfinite(apply_top_n_sigma(logits, torch.tensor([1.3])))
    assert torch.equal(torch.isfinite(apply_top_n_sigma(logits - 2.0**20, torch.tensor([1.3]))), kept)


@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.0, 7.0, 100.0])
def test_the_same_tokens_stay_at_any_temperature(temperature: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, VOCAB, dtype=torch.float64)
    request = make_request([1, 2], temperature=temperature, top_n_sigma=1.5)
    rows, at, needs = make_rows([request], [[1, 2]])
    found = process(logits, rows, at, needs)[0]
    stays = torch.isfinite(expected(logits[0], 1.5))
    assert torch.equal(torch.isfinite(found), stays) and 1 < int(stays.sum()) < VOCAB
    torch.testing.assert_close(found[stays] * temperature, logits[0, stays], rtol=1e-6, atol=0)


def test_only_sampled_requests_need_it() -> None:
    assert SamplingNeeds.for_request(make_request([1], top_n_sigma=1.0)) == SamplingNeeds()
    needed = SamplingNeeds.for_request(make_request([1], temperature=1.0, top_n_sigma=0.001))
    assert needed.operations == {"temperature", "top_n_sigma"}
    assert SamplingParams().top_n_sigma == 0.0
