from __future__ import annotations

import torch

from slipstream.kernels.elementwise.scaled_embedding import scaled_embedding


def test_rows_times_the_constant() -> None:
    weight, ids = torch.randn(9, 4, dtype=torch.float64), torch.tensor([3, 0, 3], dtype=torch.int32)
    out = scaled_embedding(weight, ids, 1.7)
    assert torch.equal(out, torch.stack([weight[3], weight[0], weight[3]]) * 1.7)


def test_the_constant_is_rounded_to_the_type_of_the_weights() -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    out = scaled_embedding(weight, torch.tensor([1], dtype=torch.int32), 3072**0.5)  # 55.4256
    assert torch.equal(out, torch.full((1, 3), 55.5, dtype=torch.bfloat16))
