"""Attention of encoders: each text alone, in float64 by torch's own attention, and the C kernel against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels import native
from slipstream.kernels.attention.encoder_attention import Texts, encoder_attention
from tests.kernels.triton_cases_encoder import TEXTS, draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TEXTS)
def test_every_token_sees_its_text(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float32 and native.library() is None:
        pytest.skip("no C compiler")
    torch.manual_seed(3)
    args = draw(TEXTS[name])
    q, k, v = (args[part].tensor.to(dtype) for part in "qkv")
    starts, lens, bias = args["query_start_loc"], args["query_lens"], args["bias"]
    out = encoder_attention(q, k, v, Texts(starts, lens), args["scale"], bias)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for start, length in zip(starts.tolist(), lens.tolist(), strict=False):
        own = slice(start, start + length)
        mask = None
        if bias is not None:
            span = (bias.shape[1] + 1) // 2
            mask = torch.stack([bias[:, span - 1 - i : span - 1 - i + length] for i in range(length)] or [bias], dim=1)
        if length:
            parts = [x[own].double().transpose(0, 1) for x in (q, k, v)]
            mixed = F.scaled_dot_product_attention(
                *parts, attn_mask=None if mask is None else mask.double(), scale=args["scale"]
            )
            expected[own] = mixed.transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-12 if dtype is torch.float64 else 5e-6)


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(4)
    for dtype in (torch.float32, torch.float64):
        q, k, v = torch.randn(3, 60, 2, 8, dtype=dtype)
        alone = encoder_attention(q[:20], k[:20], v[:20], _texts(20), 0.4)
        beside = encoder_attention(q, k, v, _texts(20, 5, 35), 0.4)
        assert torch.equal(alone, beside[:20])


def _texts(*lens: int) -> Texts:
    return Texts(torch.tensor([0, *lens]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32))
