"""gelu from the normal distribution's own function, and its approximation."""

from __future__ import annotations

import math

import torch

from slipstream.kernels.elementwise.gelu import gelu


def test_both_forms() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).view(1, -1)
    exact = [value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x[0].tolist()]
    torch.testing.assert_close(gelu(x, False)[0], torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    near = [v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x[0].tolist()]
    torch.testing.assert_close(gelu(x, True)[0], torch.tensor(near, dtype=torch.float64), rtol=1e-12, atol=1e-12)
