from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.elementwise.geglu import geglu


@pytest.mark.parametrize("shape", [(1, 2), (7, 96)])
def test_geglu(shape: tuple[int, int]) -> None:
    gate_up = np.random.default_rng(0).normal(size=shape) * 3
    gate, up = np.split(gate_up, 2, axis=1)
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    # The formula subtracts nearly equal numbers where the gate is negative, so its last bits differ in absolute terms.
    np.testing.assert_allclose(geglu(torch.tensor(gate_up)).numpy(), gelu * up, rtol=1e-12, atol=1e-14)
