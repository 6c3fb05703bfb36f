from __future__ import annotations

import pytest
import torch

from slipstream.kernels.attention.encoder_cache import gather_encoder_pages, store_encoded
from slipstream.kernels.request_rows import EncoderPages

HEADS, HEAD_DIM = 2, 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "num_entries"), [(4, 12), (4, 9), (1, 3), (16, 5)])
def test_entries_lie_in_their_pages_and_nowhere_else(page_size: int, num_entries: int, dtype: torch.dtype) -> None:
    keys, values = torch.randn(num_entries, 2, HEADS, HEAD_DIM).unbind(1)
    cache = torch.full((16, 2, HEADS, page_size, HEAD_DIM), 7.0, dtype=dtype)
    page_ids = torch.tensor([5, 2, 9, 11, 0, 0], dtype=torch.int32)
    store_encoded(keys, values, page_ids, cache)
    expected = torch.full_like(cache, 7.0)
    for entry in range(num_entries):
        page, offset = int(page_ids[entry // page_size]), entry % page_size
        expected[page, 0, :, offset], expected[page, 1, :, offset] = keys[entry].to(dtype), values[entry].to(dtype)
    assert torch.equal(cache, expected)


def test_a_batchs_pages_are_those_of_its_rows() -> None:
    rows = EncoderPages(torch.arange(12, dtype=torch.int32).view(4, 3), torch.tensor([7, 0, 9, 4], dtype=torch.int32))
    table, lens = gather_encoder_pages(rows, torch.tensor([2, 0, 1, 1], dtype=torch.int32))
    assert table.tolist() == [[6, 7, 8], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert lens.tolist() == [9, 7, 0, 0]
