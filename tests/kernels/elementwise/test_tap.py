from __future__ import annotations

import torch

from slipstream.kernels.elementwise.tap import tap


def test_taps_lie_beside_each_other() -> None:
    hidden, residual = torch.randn(2, 5, 3, dtype=torch.float64)
    out = torch.full((5, 9), torch.nan, dtype=torch.float64)
    tap(hidden, residual, out[:, 3:6])
    tap(hidden, None, out[:, :3])
    assert torch.equal(out[:, 3:6], hidden + residual)
    assert torch.equal(out[:, :3], hidden)
    assert out[:, 6:].isnan().all()
