from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.swiglu import swiglu


@pytest.mark.parametrize("shape", [(1, 2), (7, 96)])
def test_swiglu(shape: tuple[int, int]) -> None:
    gate_up = np.random.default_rng(0).normal(size=shape) * 3
    gate, up = np.split(gate_up, 2, axis=1)
    np.testing.assert_allclose(swiglu(torch.tensor(gate_up)).numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-12)
