"""Operations without a kernel of their own run on a GPU as they are: they read no value and stay on the device.

Tensors without data replace the GPU's: there is nothing in them to read, and they do not mix with the host's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.sampling.bad_words import ban_bad_words
from slipstream.sampling.logit_bias import apply_logit_bias
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.mask import TokenMasks, apply_mask
from slipstream.sampling.min_p import apply_min_p
from slipstream.sampling.min_tokens import hold_back_stops
from slipstream.sampling.temperature import apply_temperature


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


LOGITS = floats(3, 100)
CALLS: dict[str, Callable[[], Tensor]] = {
    "mask": lambda: apply_mask(LOGITS, TokenMasks(ints(9, 4), ints(3))),
    "logit_bias": lambda: apply_logit_bias(LOGITS, ints(3), ints(8), ints(8, 5), floats(8, 5)),
    "bad_words": lambda: ban_bad_words(LOGITS, ints(3), ints(8, 40), ints(3), ints(8), ints(8, 4, 3)),
    "min_tokens": lambda: hold_back_stops(LOGITS, ints(3), ints(3), ints(8), ints(8, 2)),
    "temperature": lambda: apply_temperature(LOGITS, floats(3)),
    "min_p": lambda: apply_min_p(LOGITS, floats(3)),
    "logprobs": lambda: pack_logprobs(LOGITS, ints(3).long()),
}


@pytest.mark.parametrize("name", CALLS)
def test_stays_on_the_device(name: str) -> None:
    result = CALLS[name]()
    assert result.is_meta
    assert len(result) == len(LOGITS)
