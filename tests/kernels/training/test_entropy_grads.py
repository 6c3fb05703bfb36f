"""Cross entropy and its gradients against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.training.entropy_grads import entropy_grads


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]
)
def test_losses_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    logits = (4 * torch.randn(5, 37)).to(dtype)
    target = torch.randn(5, 37).double().softmax(1).to(dtype)
    exact = logits.double().clone().requires_grad_()
    losses = -(target.double() * exact.log_softmax(1)).sum(1)
    losses.sum().backward()
    found = entropy_grads(logits, target)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=tolerance, atol=tolerance)
    assert exact.grad is not None
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=tolerance)
