from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.head_products import project_heads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "heads", "size", "out_size"), [(1, 1, 1, 1), (5, 3, 12, 24), (4, 2, 24, 10)])
def test_each_head_has_its_own_matrix(
    dtype: torch.dtype, num_tokens: int, heads: int, size: int, out_size: int
) -> None:
    # Part of each head of a projection.
    x = torch.randn(num_tokens, heads, size + 8).to(dtype)[..., :size]
    weight = torch.randn(heads, size, out_size).to(dtype)
    out = project_heads(x, weight)
    assert out.is_contiguous() and out.dtype == dtype
    for head in range(heads):
        expected = (x[:, head].double() @ weight[head].double()).to(dtype)
        torch.testing.assert_close(out[:, head], expected)


def test_there_and_back() -> None:
    """The transposed matrices need no copy."""
    x, weight = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(2, 6, 9, dtype=torch.float64)
    back = project_heads(project_heads(x, weight), weight.transpose(1, 2))
    expected = torch.einsum("thp,hpl,hql->thq", x, weight, weight)
    torch.testing.assert_close(back, expected)
