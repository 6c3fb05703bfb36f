"""The parts of the chunked kernel; the whole is tested with ``delta_rule``."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.recurrent import delta_chunks
from slipstream.kernels.recurrent.delta_chunks import CHUNK
from slipstream.kernels.triton_jit import jit
from tests.kernels.triton_check import quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@jit
def _invert_kernel(lower, inverse, stride, used):
    delta_chunks._invert(lower, inverse, stride, used)


def inverted(lower: torch.Tensor, used: int = CHUNK) -> torch.Tensor:
    made = torch.zeros_like(lower)
    with quietly_interpreted():
        _invert_kernel[(1,)](lower, made, lower.stride(0), used)
    return made


@pytest.mark.parametrize("used", [1, 15, 16, 17, 50, 64])
def test_inverse(used: int) -> None:
    lower = torch.randn(CHUNK, 2 * CHUNK)[:, :CHUNK].tril(-1) * 0.3
    lower[used:] = torch.nan  # what belongs to others
    made = inverted(lower, used)[:used, :used].double()
    product = (lower[:used, :used].double() + torch.eye(used)) @ made
    torch.testing.assert_close(product, torch.eye(used).double(), rtol=0, atol=1e-4)


def test_nothing_grows_where_all_keys_are_the_same() -> None:
    """The inverse of ones on and below the diagonal has ones on it and -1 just below."""
    made = inverted(torch.ones(CHUNK, CHUNK).tril(-1))
    assert torch.equal(made, torch.eye(CHUNK) - torch.eye(CHUNK).roll(1, 0).tril(-1))
