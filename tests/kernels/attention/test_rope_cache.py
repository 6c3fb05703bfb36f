from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config import RopeConfig
from slipstream.kernels.attention.rope_cache import NewTokens, rope_and_cache, rotation_and_slots
from slipstream.models.rope import cos_sin_table

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 16, 4, 6
# The table of cosines is float32, which bounds what float64 can show.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-6}


def rotated(x: np.ndarray, positions: list[int], theta: float, rotary_dim: int) -> np.ndarray:
    """Rotation as a product of complex numbers: entry i is the real part of pair i, entry i + half the imaginary."""
    half = rotary_dim // 2
    frequencies = theta ** (-np.arange(half) * 2 / rotary_dim)
    turn = np.exp(1j * np.outer(positions, frequencies))[:, None, :]
    pairs = (x[..., :half] + 1j * x[..., half:rotary_dim]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., rotary_dim:]], axis=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 8])
@pytest.mark.parametrize("slots", [[5, 6, 7, 8, 18], [-1, 9, -1, 4, -1], [-1] * 5])
@pytest.mark.parametrize("heads", [HEADS, 0], ids=["attends", "stores only"])
def test_rotates_and_stores(dtype: torch.dtype, rotary_dim: int, slots: list[int], heads: int) -> None:
    positions = [3, 4, 5, 6, 0]
    # Slices of a joint projection, as a model has them.
    q, k, v = torch.randn(5, heads + 2 * KV_HEADS, HEAD_DIM, dtype=dtype).split([heads, KV_HEADS, KV_HEADS], dim=1)
    table = cos_sin_table(RopeConfig(theta=100.0, rotary_dim=rotary_dim), 16, torch.device("cpu"))
    cache = torch.full((PAGES, 2, KV_HEADS, PAGE, HEAD_DIM), 7.0, dtype=dtype)
    cos, sin, *places = rotation_and_slots(table, torch.tensor(positions), q.dtype, torch.tensor(slots), PAGES, PAGE)
    out = rope_and_cache(NewTokens(q, k, v, cos, sin, *places), cache)

    np.testing.assert_allclose(out.numpy(), rotated(q.numpy(), positions, 100.0, rotary_dim), atol=TOLERANCE[dtype])
    expected = np.full(cache.shape, 7.0)
    turned_k = rotated(k.numpy(), positions, 100.0, rotary_dim)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // PAGE, 0, :, slot % PAGE] = turned_k[token]
            expected[slot // PAGE, 1, :, slot % PAGE] = v[token].numpy()
    # Tokens that are not to be stored end on the last page of the memory, which is never read.
    np.testing.assert_allclose(cache[:-1].numpy(), expected[:-1], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kept_in", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_smaller_type_is_rounded_to_the_nearest(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    every = torch.arange(-(2**31), 2**31, 40_009).to(torch.int32).view(torch.float32)
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 6.1e-5, 5.97e-8, 2.98e-8, 2.981e-8, -0.0, torch.inf, torch.nan])
    ties = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3 * 2.0**-25])
    values = torch.cat([every, edges, ties])
    values = values[: len(values) // HEAD_DIM * HEAD_DIM].view(-1, 1, HEAD_DIM).to(dtype)
    tokens = torch.arange(len(values))
    cache = torch.zeros(len(tokens) // PAGE + 1, 2, 1, PAGE, HEAD_DIM, dtype=kept_in)
    still = torch.ones(len(tokens), 1, HEAD_DIM, dtype=dtype), torch.zeros(len(tokens), 1, HEAD_DIM, dtype=dtype)
    keys = values.nan_to_num(1.0, 1.0, 1.0)
    rope_and_cache(NewTokens(keys[:, :0], keys, values, *still, tokens // PAGE, tokens % PAGE), cache)
    for found, given in zip(cache[tokens // PAGE, :, :, tokens % PAGE].unbind(1), (keys, values), strict=True):
        torch.testing.assert_close(found, given.to(kept_in), rtol=0, atol=0, equal_nan=True)
