"""Suppressed tokens against the logits processors of ``transformers``."""

from __future__ import annotations

import pytest
import torch
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from slipstream.errors import RequestError
from slipstream.sampling.registry import check_request
from slipstream.sampling.sampler import SamplingNeeds, process
from tests.sampling.rows import make_request, make_rows

VOCAB = 90
ALWAYS, AT_BEGIN = [3, 88, 3, 0], [7, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_outputs", [0, 1, 5])
def test_equals_transformers(num_outputs: int, dtype: torch.dtype) -> None:
    logits = torch.randn(1, VOCAB).to(dtype)
    prompt, output = [4, 5, 6], [10, 7, 11, 12, 20][:num_outputs]
    request = make_request(prompt, suppress_tokens=ALWAYS, begin_suppress_tokens=AT_BEGIN)
    rows, at, needs = make_rows([request], [prompt + output])
    ids = torch.tensor([prompt + output])
    expected = SuppressTokensLogitsProcessor(ALWAYS)(ids, logits)
    expected = SuppressTokensAtBeginLogitsProcessor(AT_BEGIN, begin_index=len(prompt))(ids, expected)
    assert needs.operations == {"suppress_tokens"}
    assert torch.equal(process(logits, rows, at, needs), expected)


def test_rows_do_not_see_each_other_nor_what_was_before() -> None:
    logits = torch.randn(3, VOCAB)
    former = make_request([1], suppress_tokens=list(range(40)), begin_suppress_tokens=list(range(40, 50)))
    requests = [make_request([1, 2]), make_request([1], suppress_tokens=[5]), make_request([1, 2])]
    rows, at, needs = make_rows(requests, [[1, 2], [1], [1, 2]], before=(former, [1]))
    expected = logits.clone()
    expected[1, 5] = -torch.inf
    assert torch.equal(process(logits, rows, at, needs), expected)


def test_who_needs_it_and_what_is_refused() -> None:
    assert not SamplingNeeds.for_request(make_request([1])).operations
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        assert SamplingNeeds.for_request(make_request([1], **{name: [2]})).operations == {"suppress_tokens"}
        with pytest.raises(RequestError, match=f"{name} holds 90, which is not a token id below 90"):
            check_request(make_request([1], **{name: [90]}), VOCAB)
        with pytest.raises(RequestError, match=f"{name} has 300 entries"):
            make_request([1], **{name: range(300)})
