from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config import RopeConfig
from slipstream.kernels.attention.latent_cache import NewLatents, alike_requests, gather_latents, store_latents
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import rotation_and_slots
from slipstream.models.rope import cos_sin_table
from tests.kernels.attention.dense_latents import entries_of
from tests.kernels.attention.test_rope_cache import rotated
from tests.kernels.triton_cases_latent import SMALL, Batch, draw_cache, ints

LATENT, ROPE, PAGE, PAGES = 24, 8, 4, 6
# The table of cosines is float32, which bounds what float64 can show.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-6}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slots", [[5, 6, 7, 8, 18], [-1, 9, -1, 4, -1], [-1] * 5])
@pytest.mark.parametrize("heads", [3, 0], ids=["attends", "stores only"])
def test_norms_rotates_and_stores(dtype: torch.dtype, slots: list[int], heads: int) -> None:
    positions = [3, 4, 5, 6, 0]
    q = torch.randn(5, heads, 12 + ROPE, dtype=dtype)[..., 12:]
    latents = torch.randn(5, 7 + LATENT + ROPE, dtype=dtype)[:, 7:]
    gain = torch.randn(LATENT, dtype=dtype)
    table = cos_sin_table(RopeConfig(theta=100.0, rotary_dim=ROPE), 16, torch.device("cpu"))
    cache = torch.full((PAGES, PAGE, LATENT + ROPE), 7.0, dtype=dtype)
    cos, sin, *places = rotation_and_slots(table, torch.tensor(positions), dtype, torch.tensor(slots), PAGES, PAGE)
    out = store_latents(NewLatents(q, latents, gain, 1e-5, cos, sin, *places), cache)

    assert out.is_contiguous()
    np.testing.assert_allclose(out.numpy(), rotated(q.numpy(), positions, 100.0, ROPE), atol=TOLERANCE[dtype])
    c, k = latents[:, :LATENT].double().numpy(), latents[:, None, LATENT:].double().numpy()
    normed = c / np.sqrt((c**2).mean(axis=1, keepdims=True) + 1e-5) * gain.double().numpy()
    entries = np.concatenate([normed, rotated(k, positions, 100.0, ROPE)[:, 0]], axis=1)
    expected = np.full(cache.shape, 7.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // PAGE, slot % PAGE] = entries[token]
    # Tokens that are not to be stored end on the last page of the memory, which is never read.
    np.testing.assert_allclose(cache[:-1].numpy(), expected[:-1], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("first", "num"), [(0, 40), (7, 9), (39, 30), (64, 2)])
def test_gathers_what_is_there(first: int, num: int) -> None:
    requests = Batch([1, 2, 0, 1], [40, 9, 0, 3], padding=1, seq_starts=(5, 0, 0, 2)).requests(PAGE)
    cache = draw_cache(requests, SMALL)
    latents, rope = gather_latents(cache, PagedRequests(**requests), first, num, LATENT)
    expected = torch.zeros(5, num, LATENT + ROPE)
    for i, (length, start) in enumerate([(40, 5), (9, 0), (0, 0), (3, 2), (0, 0)]):
        entries = entries_of(cache, requests, i)
        for slot in range(max(first, start), min(first + num, length)):
            expected[i, slot - first] = entries[slot]
    assert torch.equal(torch.cat([latents, rope], dim=1), expected.flatten(0, 1))


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_are_computed_together_are_alike(seed: int) -> None:
    torch.manual_seed(seed)
    counts = torch.randint(0, 4, (30,)) * torch.randint(1, 9, (30,))
    lens = counts + (20_000 * torch.rand(30) ** 5).int()
    takes_part = torch.rand(30) < 0.8
    starts = torch.cat([ints([0]), counts.cumsum(0).int()])
    requests = PagedRequests(starts, counts.int(), lens.int(), torch.zeros(30, 1, dtype=torch.int32))
    groups = list(alike_requests(requests, takes_part, first_key=100, max_keys=5000))
    ids = [i for group in groups for i in group.ids.tolist()]
    assert ids == [i for i in range(30) if takes_part[i] and counts[i] and lens[i] > 100]
    for group in groups:
        own = (lens[group.ids] - 100).clamp(max=5000)
        assert group.num_keys == own.max()
        assert group.tokens[group.exists].tolist() == [
            int(starts[i]) + j for i in group.ids.tolist() for j in range(int(counts[i]))
        ]
        done, needed = group.hidden.numel(), int((counts[group.ids] * own).sum())
        assert len(group.ids) == 1 or done <= 2 * needed + 4096
    # Neighbours of one size are one group.
    same = requests._replace(query_start_loc=torch.arange(31), query_lens=ints([1] * 30), seq_lens=ints([200] * 30))
    assert len(list(alike_requests(same, torch.ones(30, dtype=torch.bool)))) == 1
