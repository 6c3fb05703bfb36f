"""Scores against float64, token by token and key by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import index_scores as module
from slipstream.kernels.attention.index_scores import IndexQueries, index_scores
from slipstream.kernels.attention.token_keys import TokenKeys
from tests.bundles import bundle
from tests.kernels.attention.dense_latents import dense_index_scores
from tests.kernels.triton_cases_index import BATCHES, TINY, score_args
from tests.kernels.triton_check import Real, poisoned_allocations, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def drawn(name: str) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Arguments of the operation, and the requests that they were made of."""
    torch.manual_seed(1)
    args = score_args(BATCHES[name], TINY, spare_keys=9)
    torch.manual_seed(1)
    requests = BATCHES[name].requests(TINY.page_size)
    return {key: x.tensor if isinstance(x, Real) else x for key, x in args.items()}, requests


def scored(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted(), poisoned_allocations():
        return index_scores.body(**bundle(index_scores, args))


@pytest.mark.parametrize("name", BATCHES)
def test_definition_is_a_sum_over_heads_of_what_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PRODUCTS", 3000)
    args, requests = drawn(name)
    wide = {key: args[key].double() for key in ("q", "weights", "keys")}
    actual = index_scores(**bundle(index_scores, args | wide))
    expected = dense_index_scores(*wide.values(), requests, args["max_keys"], args["scale"])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    seen = expected[expected.isfinite()]
    assert name == "one" or ((seen < 0).any() and (seen > 0).any())


def test_products_are_not_rounded_to_the_models_type() -> None:
    args, _ = drawn("steps")
    narrow = args | {key: args[key].bfloat16() for key in ("q", "keys")}
    wide = args | {key: args[key].bfloat16().float() for key in ("q", "keys")}
    scores = [index_scores(**bundle(index_scores, x)) for x in (narrow, wide)]
    assert scores[0].dtype == torch.float32 and torch.equal(*scores)


@needs_triton
@pytest.mark.parametrize("name", ["drafts", "starts"])
def test_bits_do_not_depend_on_programs_bounds_and_other_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, _ = drawn(name)
    together = scored(args)
    monkeypatch.setattr(module, "_WANTED_PROGRAMS", 1)
    more = scored(args | {"max_keys": args["max_keys"] + 300})
    assert torch.equal(more[:, : args["max_keys"]], together)
    assert (more[:, args["max_keys"] :] == -torch.inf).all()
    own = slice(1, 4)
    queries, tokens = (
        IndexQueries(args["q"], args["weights"]),
        TokenKeys(args["requests"], args["firsts"], args["ends"]),
    )
    fewer = {**queries.__class__(*(x[own] for x in queries))._asdict(), **tokens.of(own)._asdict()}
    assert torch.equal(scored(args | fewer), together[own])
