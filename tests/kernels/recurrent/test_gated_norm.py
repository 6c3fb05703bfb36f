from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from slipstream.kernels import triton_jit
from slipstream.kernels.recurrent.gated_norm import gated_norm
from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norm_is_transformers(dtype: torch.dtype) -> None:
    norm = Qwen3NextRMSNormGated(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(7, 48).to(dtype), (3 * torch.randn(7, 48)).to(dtype)
    with torch.no_grad():
        expected = norm(x, gate)
    out = gated_norm(x, gate, norm.weight.detach(), 1e-5)
    assert out.dtype == dtype
    # What is rounded is rounded at the same points: no more than last bits may differ.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_norm_is_its_formula() -> None:
    x, gate, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 3, 16), (5, 3, 16), (16,)))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * gate / (1 + (-gate).exp())
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-6), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
def test_kernel_reads_heads_where_they_lie() -> None:
    joint, weight = torch.randn(5, 9 * 40).half(), torch.randn(40).half()
    for x, gate in (
        (joint[:, :120].view(5, 3, 40), joint[:, 120:240].view(5, 3, 40)),
        (torch.randn(5, 3, 40).half(), joint[:, 200:320].view(5, 3, 40)),
        (joint[:, :40], joint[:, 80:120]),
        (joint.view(5, 40, 9)[..., 0], joint.view(5, 40, 9)[..., 1]),
    ):
        with quietly_interpreted(), poisoned_allocations():
            out, of_copies = (gated_norm(*pair, weight, 1e-6) for pair in ((x, gate), (x.clone(), gate.clone())))
        assert out.is_contiguous()
        assert torch.equal(out, of_copies)
        torch.testing.assert_close(out, gated_norm(x, gate, weight, 1e-6), rtol=4e-3, atol=4e-3)
