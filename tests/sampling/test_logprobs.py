from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.sampling.logprobs import LOGPROB_WIDTH, pack_logprobs, unpack_logprobs


@pytest.mark.parametrize("vocab", [5, 20, 300])
def test_equals_a_log_softmax_in_numpy(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(4, vocab)) * 4
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    token_ids = np.array([0, vocab - 1, 2, 3])
    packed = pack_logprobs(torch.from_numpy(logits), torch.from_numpy(token_ids))
    assert packed.shape == (4, LOGPROB_WIDTH)
    for row, logprobs, token in zip(unpack_logprobs(packed.numpy()), expected, token_ids, strict=True):
        order = np.argsort(-logprobs)
        assert row.rank == list(order).index(token) + 1
        assert row.token_ids[0] == token and row.values[0] == pytest.approx(logprobs[token], abs=1e-5)
        count = min(20, vocab)
        assert row.token_ids[1 : 1 + count] == order[:count].tolist()
        np.testing.assert_allclose(row.values[1 : 1 + count], logprobs[order[:count]], atol=1e-5)
        assert row.token_ids[1 + count :] == [-1] * (20 - count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_logits_of_few_bits_have_log_probabilities_of_many(dtype: torch.dtype) -> None:
    """Those of the numbers as they are; a bfloat16 near -10 is off by 0.03."""
    logits = (4.0 * torch.randn(3, 5000)).to(dtype)
    expected = logits.double().log_softmax(1)
    token_ids = torch.tensor([7, 4999, 2500])
    rows = unpack_logprobs(pack_logprobs(logits, token_ids).numpy())
    for row, own in zip(rows, expected, strict=True):
        assert row.values == pytest.approx(own[row.token_ids].tolist(), abs=1e-4)
