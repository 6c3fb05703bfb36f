"""Philox4x32-10, the counter-based generator of Salmon et al. (2011), in torch integer arithmetic.

Counter-based means stateless: the n-th number needs no predecessor, so a request's noise does not depend on its
neighbours, on the batch or on how often a position is evaluated.
"""

from __future__ import annotations

from torch import Tensor

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter. All tensors are int64 holding values below 2**32, and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap into the sign; the masks recover both halves.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & MASK) ^ c1 ^ k0, ((first >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = second & MASK, first & MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & MASK, (k1 + _KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3
