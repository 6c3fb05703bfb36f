"""Attention for ``--exact``: a token's result is the same, to the bit, however its request is cut into steps."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import exact_attention as module
from slipstream.kernels.attention import latent_parts
from slipstream.kernels.attention.exact_attention import Shares, exact_attention, share_parts
from slipstream.kernels.attention.paged_attention import PagedRequests
from tests.kernels.order_revealing import order_revealed

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
# So that few keys have many parts, of several sizes, some of them shorter than a chunk.
LADDER = ((16, 3), (64, 1), (128, 1 << 18))


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LADDER", LADDER)
    monkeypatch.setattr(latent_parts, "LADDER", LADDER)


class Texts(NamedTuple):
    """The queries of whole texts, and their keys and values in pages."""

    q: list[Tensor]  # one a text: [length, heads, head_dim]
    cache: Tensor
    table: Tensor  # [num_texts, max_pages]

    def attend(self, spans: list[tuple[int, int, int]], query_len: int = 0, window: int = 0, spare: int = 0) -> Tensor:
        """Of each span, a text with its first and its end position, what its tokens get; ``spare`` requests pad."""
        counts = [end - first for _, first, end in spans] + [0] * spare
        queries = [self.q[text][first:end] for text, first, end in spans]
        queries += [torch.zeros_like(self.q[0][:query_len])] * spare
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + (query_len or count))
        tables = [self.table[text] for text, _, _ in spans] + [torch.zeros_like(self.table[0])] * spare
        ends = [end for _, _, end in spans] + [0] * spare
        requests = PagedRequests(
            *(torch.tensor(x, dtype=torch.int32) for x in (starts, counts, ends)), torch.stack(tables)
        )
        return exact_attention.body(torch.cat(queries), self.cache, requests, 0.3, window, query_len)


def draw(lengths: list[int], heads: int = 6, kv_heads: int = 2, head_dim: int = 16) -> Texts:
    page_size = 8
    max_pages = -(-max(lengths) // page_size) + 1
    num_pages = len(lengths) * max_pages + 1
    cache = torch.randn(num_pages, 2, kv_heads, page_size, head_dim, dtype=torch.float16)
    table = 1 + torch.randperm(num_pages - 1).view(len(lengths), max_pages).int()
    q = [2 * torch.randn(length, heads, head_dim, dtype=torch.float16) for length in lengths]
    return Texts(q, cache, table)


@pytest.mark.parametrize(("window", "heads"), [(0, (6, 2, 16)), (70, (4, 4, 24)), (3, (3, 1, 16))])
def test_a_token_does_not_depend_on_its_step(window: int, heads: tuple[int, int, int]) -> None:
    rng = random.Random(window)
    texts, begin, end, other = draw([190, 101], *heads), 130, 190, 101
    with order_revealed():
        whole = texts.attend([(0, begin, end)], window=window)
        for count in (1, rng.randrange(2, 18)):  # decoding, and verifying so many less one
            first = rng.randrange(begin, end - count)
            alone = texts.attend([(0, first, first + count)], count, window)
            assert torch.equal(alone, whole[first - begin : first - begin + count])
            beside = texts.attend([(1, other - count, other), (0, first, first + count)], count, window, spare=2)
            assert torch.equal(beside[count : 2 * count], alone) and not beside[2 * count :].any()
        cut = rng.randrange(begin + 5, end - 5)  # prompts in chunks, with another's, and with a decode
        earlier = texts.attend([(1, 3, 20), (0, begin, cut)], window=window)
        later = texts.attend([(0, cut, end), (1, other - 1, other)], window=window)
        assert torch.equal(torch.cat([earlier[17:], later[:-1]]), whole)


def test_a_token_does_not_depend_on_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = draw([200])
    with order_revealed():
        made = []
        for programs in (1, 2, 3, 8, 64):
            monkeypatch.setattr(module, "share_parts", lambda *_, n=programs: Shares(n, latent_parts.count_parts(300)))
            made.append(texts.attend([(0, 198, 200)], 2))
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_a_cut_by_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = draw([200])
    with order_revealed():
        whole = texts.attend([(0, 150, 200)])
        for target in (module, latent_parts):
            monkeypatch.setattr(target, "LADDER", ((32, 1 << 18),))
        alone = texts.attend([(0, 199, 200)], 1)
    assert not torch.equal(alone, whole[-1:])
    torch.testing.assert_close(alone, whole[-1:], rtol=4e-3, atol=4e-3)


def test_partial_results_have_limited_memory() -> None:
    assert share_parts(1 << 12, 4, 128, 4096).programs == 1, "enough programs without"
    assert share_parts(128, 20, 128, 1 << 20).programs == 1, "too many parts to be kept"
    few = share_parts(3, 3, 64, 2048)
    assert 1 < few.programs <= 64 and few.max_parts == latent_parts.count_parts(2048)
