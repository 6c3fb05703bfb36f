"""The choice of keys against sorting by hand, against torch's top-k, and a whole indexer against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from slipstream.config import RopeConfig
from slipstream.kernels import triton_jit
from slipstream.kernels.attention import index_topk
from slipstream.kernels.attention.index_cache import NewIndexKeys, store_index_keys
from slipstream.kernels.attention.index_scores import IndexQueries
from slipstream.kernels.attention.index_topk import choose_positions, top_positions
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import rotation
from slipstream.kernels.attention.token_keys import TokenKeys, find_token_keys
from slipstream.models.rope import cos_sin_table
from tests.bundles import bundle
from tests.kernels.attention.dense_latents import dense_index_scores
from tests.kernels.triton_cases_index import BATCHES, TINY, choose_args, score_args, special_rows, top_args
from tests.kernels.triton_cases_latent import Batch, ints
from tests.kernels.triton_check import Real, poisoned_allocations, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
WAYS = ["definition", pytest.param("kernel", marks=needs_triton)]
Result = tuple[Tensor, Tensor]


def top(way: str, scores: Tensor, k: int) -> Result:
    if way == "definition":
        return top_positions(scores, k)
    with quietly_interpreted(), poisoned_allocations():
        return top_positions.body(scores, k)


def choose(way: str, args: dict[str, Any]) -> Result:
    own = bundle(choose_positions, args)
    if way == "definition":
        return choose_positions(**own)
    with quietly_interpreted(), poisoned_allocations():
        return choose_positions.body(**own)


def by_hand(row: list[float], k: int) -> list[int]:
    """Of equal numbers the first; both zeros are equal."""
    order = sorted((i for i, x in enumerate(row) if x != -math.inf), key=lambda i: (-row[i], i))
    return sorted(order[:k])


def expect(result: Result, scores: Tensor, k: int) -> None:
    positions, counts = result
    for row, own, count in zip(scores.tolist(), positions.tolist(), counts.tolist(), strict=True):
        expected = by_hand(row, k)
        assert count == len(expected)
        assert own == expected + [-1] * (k - count)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few scores are counted by many programs."""
    monkeypatch.setattr(index_topk, "_BLOCK", 64)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 5, 9, 11])
def test_zeros_infinities_and_ties(way: str, k: int) -> None:
    rows = torch.cat([special_rows(), special_rows().repeat(1, 3)[:, :10]])
    expect(top(way, rows, k), rows, k)
    wide = special_rows().repeat(1, 15)
    expect(top(way, wide, k), wide, k)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("levels", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_and_of_equal_ones_the_first(way: str, levels: float, seed: int) -> None:
    torch.manual_seed(seed)
    max_keys, k, seen = [(200, 8, 1.0), (333, 100, 0.6), (50, 40, 0.3)][seed]
    scores = top_args(4, max_keys, k, levels, seen)["scores"] * 10.0 ** torch.randint(-9, 9, (4, 1))
    scores[1] = -scores[1].abs()
    result = top(way, scores, k)
    expect(result, scores, k)
    for row, own, count in zip(scores, *result, strict=True):
        wanted = row.topk(k).values
        assert torch.equal(row[own[:count].long()].sort(descending=True).values, wanted[wanted > -torch.inf])


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_is_chosen_first_and_does_no_harm(way: str) -> None:
    negative = torch.tensor([-(1 << 22)], dtype=torch.int32).view(torch.float32)
    assert negative.isnan() and negative.signbit()
    row = torch.tensor([[1.0, torch.nan, 3.0, torch.inf, float(negative), 2.0]])
    row[0, 4] = negative[0]
    positions, counts = top(way, row, 3)
    assert positions.tolist() == [[1, 3, 4]] and counts.tolist() == [3]


@needs_triton
@pytest.mark.parametrize("max_parts", [1, 3, 8])
def test_the_choice_does_not_depend_on_the_parts(max_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = top_args(2, 250, 40, 2.0, 0.8)["scores"]
    monkeypatch.setattr(index_topk, "_BLOCK", 32)
    monkeypatch.setattr(index_topk, "_MAX_PARTS", max_parts)
    expect(top("kernel", scores, 40), scores, 40)


def plain(args: dict[str, Any]) -> dict[str, Any]:
    return {key: x.tensor if isinstance(x, Real) else x for key, x in args.items()}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["steps", "drafts", "starts"])
def test_chooses_among_what_each_token_sees(way: str, name: str) -> None:
    torch.manual_seed(2)
    args = plain(choose_args(BATCHES[name], TINY, 8))
    torch.manual_seed(2)
    requests = BATCHES[name].requests(TINY.page_size)
    scores = dense_index_scores(args["q"], args["weights"], args["keys"], requests, args["max_keys"], args["scale"])
    expect(choose(way, args), scores, 8)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("way", WAYS)
def test_a_token_does_not_depend_on_bounds_and_batch(way: str) -> None:
    """Scores are any numbers here: those of a token are the same bits everywhere."""
    args = plain(score_args(Batch([3, 1], [90, 130]), TINY)) | {"k": 20}
    expected = choose(way, args)
    own, names = slice(2, 4), ("q", "weights", "requests", "firsts", "ends")
    for more in (1, 200):
        fewer = {key: args[key][own] for key in names} | {"max_keys": args["max_keys"] + more}
        alone = choose(way, args | fewer)
        assert all(torch.equal(part, whole[own]) for part, whole in zip(alone, expected, strict=True))


CONFIG = DeepseekV32Config(
    hidden_size=32, q_lora_rank=16, index_n_heads=7, index_head_dim=12, qk_rope_head_dim=8, index_topk=8
)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_an_indexer_chooses_as_that_of_transformers(way: str) -> None:
    """One request of 40 tokens, all of them in one pass and then the last three again."""
    torch.manual_seed(3)
    num, page_size = 40, 4
    indexer = DeepseekV32Indexer(CONFIG, 0)
    indexer.k_norm.weight.normal_()
    indexer.k_norm.bias.normal_()
    hidden, latent = torch.randn(num, 32), torch.randn(num, 16)
    table = cos_sin_table(RopeConfig(theta=50.0, rotary_dim=8), num, torch.device("cpu"))
    cos, sin = table[:, 0].repeat(1, 2), table[:, 1].repeat(1, 2)
    hides = torch.ones(num, num, dtype=torch.bool).tril()
    theirs = indexer(hidden[None], latent[None], (cos[None], sin[None]), hides[None], torch.arange(num)[None])[0]

    q, k = indexer.wq_b(latent).view(num, 7, 12), indexer.wk(hidden)
    turns, slots = rotation(table, torch.arange(num), torch.float32), torch.arange(num)
    pages = torch.randperm(num // page_size)
    norm = (indexer.k_norm.weight, indexer.k_norm.bias, indexer.k_norm.eps)
    keys = torch.full((num // page_size + 1, page_size, 12), torch.nan)
    q = store_index_keys(NewIndexKeys(q, k, *norm, *turns, pages[slots // page_size], slots % page_size), keys)
    weights = indexer.weights_proj(hidden) * 7**-0.5
    table_of_pages = {"block_table": pages.int().unsqueeze(0), "seq_starts": None}
    whole = {"query_start_loc": ints([0, num]), "query_lens": ints([num]), "seq_lens": ints([num]), **table_of_pages}
    best = dense_index_scores(q, weights, keys, whole, num, 12**-0.5).sort(descending=True).values
    # Theirs take any of equal ones: those without a positive product.
    is_clear = (best[:, 7] - best[:, 8] > 1e-5) | (torch.arange(num) < 8)
    assert is_clear.sum() > 30 and is_clear[-3:].all()
    for count in (num, 3):
        requests = PagedRequests(ints([0, count]), ints([count]), ints([num]), pages.int().unsqueeze(0))
        tokens = TokenKeys(*find_token_keys(requests, count))
        queries = IndexQueries(q[num - count :], weights[num - count :])
        own = {**queries._asdict(), **tokens._asdict(), "keys": keys, "block_table": requests.block_table}
        positions, counts = choose(way, own | {"max_keys": num, "scale": 12**-0.5, "k": 8})
        for position, mine, other in zip(range(num - count, num), positions, theirs[num - count :], strict=True):
            # Theirs fill up with what is not seen.
            same = set(mine.tolist()) - {-1} == {i for i in other.tolist() if i <= position}
            assert same or not is_clear[position]
        assert counts.tolist() == [min(i + 1, 8) for i in range(num - count, num)]


@needs_triton
def test_tokens_that_see_few_keys_have_no_scores_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have all their keys, without any being read."""
    args = plain(score_args(Batch([1, 2], [8, 3]), TINY)) | {"k": 8}
    args["keys"].fill_(torch.nan)
    positions, counts = choose("kernel", args)
    assert positions.tolist() == [[*range(8)], [0, 1, *[-1] * 6], [0, 1, 2, *[-1] * 5]]
    assert counts.tolist() == [8, 2, 3]
