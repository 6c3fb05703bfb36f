"""What torch does while kernels are only compiled: numbers that no kernel has made lead nowhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels import triton_jit
from slipstream.kernels.triton_jit import compile_ahead

pytestmark = pytest.mark.skipif(triton_jit._background is None, reason="this Triton compiles one after the other")
FAR = torch.tensor([7, -900, 1 << 40])
TABLE = torch.arange(8.0).view(4, 2)


def test_lookups_find_the_first() -> None:
    with pytest.raises(IndexError):
        TABLE[FAR]
    with compile_ahead(), torch.inference_mode():
        found = [TABLE[FAR], TABLE.index_select(0, FAR), F.embedding(FAR, TABLE), TABLE[FAR, :]]
        assert TABLE[FAR, torch.tensor([3, 9, 1])].tolist() == [0.0] * 3
        assert TABLE.gather(1, FAR.view(3, 1)).tolist() == [[0.0], [2.0], [4.0]]
        found += [torch.index_select(TABLE, 0, index=FAR), F.embedding(input=FAR, weight=TABLE)]
    assert [part.tolist() for part in found] == [[[0.0, 1.0]] * 3] * 6
    assert TABLE[torch.tensor([3])].tolist() == [[6.0, 7.0]], "and outside everything is as ever"


def test_writes_do_not_happen() -> None:
    store = torch.zeros(4, dtype=torch.int64)
    with compile_ahead(), torch.inference_mode():
        store[FAR] = 5
        store.index_copy_(0, FAR, FAR)
        store.scatter_(0, FAR, FAR)
        assert store.scatter_add(0, FAR, FAR).tolist() == [0] * 4
        store[:2] = 3  # at a known index
    assert store.tolist() == [3, 3, 0, 0]


def test_repetitions_have_the_size_that_was_said() -> None:
    with compile_ahead(), torch.inference_mode():
        assert torch.repeat_interleave(FAR, FAR, output_size=5).shape == (5,)
        assert torch.repeat_interleave(FAR, output_size=6).tolist() == [0] * 6
        assert TABLE.repeat_interleave(FAR, dim=1, output_size=3).shape == (4, 3)


def test_what_is_compiled_by_torch_still_is() -> None:
    """Flex attention is a call of its own kind, which not every mode lets through."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 1, 2, 16, 16)
    attend = torch.compile(flex_attention, backend="eager")
    with compile_ahead(), torch.inference_mode():
        found = attend(q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))
