from __future__ import annotations

import pytest
import torch

from slipstream.sampling.philox import philox

# Known answers published with the Random123 library for philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse_words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = parse_words(counter)
    k0, k1 = parse_words(key)
    assert philox((c0, c1, c2, c3), (k0, k1)) == parse_words(expected)
