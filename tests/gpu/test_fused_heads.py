"""Draft heads on the GPU in the type they are made for: by few launches they round no worse than by many."""

from __future__ import annotations

import pytest
import torch

fused_heads = pytest.importorskip("tests.models.heads.test_fused_head", reason="transformers makes the tiny targets")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", fused_heads.DENSE)
def test_kernels_round_no_worse_than_the_plain_way(name: str, dtype: torch.dtype) -> None:
    fused_heads.check_against_plain(name, dtype, "cuda")
