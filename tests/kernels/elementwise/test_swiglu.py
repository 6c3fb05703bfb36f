from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.elementwise.swiglu import swiglu


@pytest.mark.parametrize("shape", [(1, 2), (7, 96)])
def test_swiglu(shape: tuple[int, int]) -> None:
    gate_up = np.random.default_rng(0).normal(size=shape) * 3
    gate, up = np.split(gate_up, 2, axis=1)
    np.testing.assert_allclose(swiglu(torch.tensor(gate_up)).numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-12)


def test_float32_over_the_whole_range() -> None:
    gate_up = torch.cat([torch.linspace(-100, 100, 4001), torch.ones(4001)]).view(1, -1)
    expected = swiglu(gate_up.double())
    torch.testing.assert_close(swiglu(gate_up).double(), expected, rtol=1e-6, atol=1e-30)
    assert swiglu(torch.tensor([[torch.nan, 1.0]])).isnan().all()
