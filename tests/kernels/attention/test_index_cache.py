from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config import RopeConfig
from slipstream.kernels.attention.index_cache import NewIndexKeys, store_index_keys
from slipstream.kernels.attention.rope_cache import rotation_and_slots
from slipstream.models.rope import cos_sin_table
from tests.kernels.attention.test_rope_cache import rotated

DIM, ROPE, PAGE, PAGES = 12, 8, 4, 6
# The table of cosines is float32, which bounds what float64 can show.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-6}
POSITIONS = [3, 4, 5, 6, 0]


def drawn(heads: int, slots: list[int], dtype: torch.dtype, interleaved: bool = False) -> NewIndexKeys:
    table = cos_sin_table(RopeConfig(theta=100.0, rotary_dim=ROPE), 16, torch.device("cpu"))
    turns = rotation_and_slots(table, torch.tensor(POSITIONS), dtype, torch.tensor(slots), PAGES, PAGE)
    q, k = torch.randn(5, heads, 7 + DIM, dtype=dtype)[..., 7:], 2 + 3 * torch.randn(5, 7 + DIM, dtype=dtype)[:, 7:]
    return NewIndexKeys(q, k, *torch.randn(2, DIM, dtype=dtype), 1e-3, *turns, interleaved)


def normed(new: NewIndexKeys) -> np.ndarray:
    k = new.k.double().numpy()
    away = k - k.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((away**2).mean(axis=1, keepdims=True) + new.eps)
    made: np.ndarray = away * scale * new.weight.double().numpy() + new.bias.double().numpy()
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slots", [[5, 6, 7, 8, 18], [-1, 9, -1, 4, -1], [-1] * 5])
@pytest.mark.parametrize("heads", [3, 0], ids=["attends", "stores only"])
def test_norms_rotates_and_stores(dtype: torch.dtype, slots: list[int], heads: int) -> None:
    new, keys = drawn(heads, slots, dtype), torch.full((PAGES, PAGE, DIM), 7.0, dtype=dtype)
    out = store_index_keys(new, keys)
    assert out.is_contiguous()
    np.testing.assert_allclose(out.numpy(), rotated(new.q.numpy(), POSITIONS, 100.0, ROPE), atol=TOLERANCE[dtype])
    entries = rotated(normed(new)[:, None], POSITIONS, 100.0, ROPE)[:, 0]
    expected = np.full(keys.shape, 7.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // PAGE, slot % PAGE] = entries[token]
    # Tokens that are not to be stored end on the last page of the memory, which is never read.
    np.testing.assert_allclose(keys[:-1].numpy(), expected[:-1], atol=TOLERANCE[dtype])


def test_neighbours_turn_together() -> None:
    """Only products of queries and keys matter; what is not rotated is where it was."""
    new = drawn(3, [5, 6, 7, 8, 18], torch.float64, interleaved=True)
    keys = torch.zeros(PAGES, PAGE, DIM, dtype=torch.float64)
    q, k = store_index_keys(new, keys), keys.flatten(0, 1)[[5, 6, 7, 8, 18]]
    order = [*range(0, ROPE, 2), *range(1, ROPE, 2), *range(ROPE, DIM)]
    apart_q, apart_k = (rotated(x[..., order], POSITIONS, 100.0, ROPE) for x in (new.q.numpy(), normed(new)[:, None]))
    expected = np.einsum("qhd,kxd->qhk", apart_q, apart_k)
    np.testing.assert_allclose(torch.einsum("qhd,kd->qhk", q, k).numpy(), expected, atol=1e-5)
    assert torch.equal(q[..., ROPE:], new.q[..., ROPE:])
