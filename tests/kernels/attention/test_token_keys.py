from __future__ import annotations

import pytest

from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.token_keys import TokenKeys, find_token_keys
from tests.kernels.attention.dense_latents import seen_by_tokens
from tests.kernels.triton_cases_index import BATCHES


@pytest.mark.parametrize("name", BATCHES)
def test_each_token_has_its_request_and_what_it_sees(name: str) -> None:
    batch = BATCHES[name]
    requests = batch.requests(4)
    found = TokenKeys(*find_token_keys(PagedRequests(**requests), batch.num_tokens))
    expected = [(0, 0, 0)] * batch.num_tokens
    for token, i, first, end in seen_by_tokens(requests):
        if first < end:
            expected[token] = (i, first, end)
    assert list(zip(*(x.tolist() for x in found), strict=True)) == expected
    part = found.of(slice(2, 5))
    assert list(zip(*(x.tolist() for x in part), strict=True)) == expected[2:5]
