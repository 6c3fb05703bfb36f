"""Attention to chosen latents against float64, token by token, and against decoding over all latents."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import sparse_latent
from slipstream.kernels.attention.sparse_latent import sparse_latent_attention
from tests.bundles import bundle
from tests.kernels.attention.dense_latents import dense_decode, dense_sparse
from tests.kernels.triton_cases_index import BATCHES, SPARSE, sparse_args
from tests.kernels.triton_cases_latent import SMALL, Batch, Sizes
from tests.kernels.triton_check import TOLERANCE, Real, poisoned_allocations, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def drawn(batch: Batch, sizes: Sizes, k: int, part_size: int) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Arguments, with what must not be read of positions far outside, and the requests that they were made of."""
    torch.manual_seed(1)
    args = sparse_args(batch, sizes, k, part_size)
    torch.manual_seed(1)
    requests = batch.requests(sizes.page_size)
    args["positions"] = torch.where(args["positions"] < 0, 1 << 30, args["positions"]).int()
    return {key: x.tensor if isinstance(x, Real) else x for key, x in args.items()}, requests


def attend(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted(), poisoned_allocations():
        return sparse_latent_attention.body(**bundle(sparse_latent_attention, args))


def expected(args: dict[str, Any], requests: dict[str, Tensor | None]) -> Tensor:
    lists = [own[:count] for own, count in zip(args["positions"].tolist(), args["counts"].tolist(), strict=True)]
    return dense_sparse((args["latent"], args["rope"]), args["cache"], requests, lists, args["scale"])


@pytest.mark.parametrize("name", SPARSE)
def test_definition_is_a_sum_over_what_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_latent, "_MAX_ENTRIES", 60)
    args, requests = drawn(*SPARSE[name])
    wide = args | {key: args[key].double() for key in ("latent", "rope", "cache")}
    actual = sparse_latent_attention(**bundle(sparse_latent_attention, wide))
    torch.testing.assert_close(actual, expected(args, requests), rtol=1e-10, atol=1e-10)


@needs_triton
def test_a_batch_of_padding_alone() -> None:
    """As in a warm-up: no token attends to anything."""
    args, _ = drawn(BATCHES["starts"], SMALL, 8, 4)
    args["counts"] = torch.zeros_like(args["counts"])
    assert not sparse_latent_attention(**bundle(sparse_latent_attention, args)).any()
    assert not attend(args).any()


def test_all_positions_are_decoding_over_all_latents() -> None:
    args, requests = drawn(BATCHES["starts"], SMALL, 300, 64)
    wide = args | {key: args[key].double() for key in ("latent", "rope", "cache")}
    actual = sparse_latent_attention(**bundle(sparse_latent_attention, wide))
    dense = dense_decode((args["latent"], args["rope"]), args["cache"], requests, 99, args["scale"])
    assert dense.any()
    torch.testing.assert_close(actual, dense, rtol=1e-10, atol=1e-10)


@needs_triton
@pytest.mark.parametrize("part_size", [7, 16, 64])
def test_parts_of_any_size(part_size: int) -> None:
    args, requests = drawn(BATCHES["drafts"], SMALL._replace(heads=19), 40, part_size)
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(attend(args).double(), expected(args, requests), rtol=tolerance, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("name", ["drafts", "starts"])
def test_a_token_does_not_depend_on_its_batch(name: str) -> None:
    """Bit for bit, alone and among others."""
    args, _ = drawn(*SPARSE[name])
    together = attend(args)
    names = ("latent", "rope", "requests", "firsts", "ends", "positions", "counts")
    for own in (slice(1, 2), slice(2, 5)):
        assert torch.equal(attend(args | {key: args[key][own] for key in names}), together[own])


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.slow)
            for capability in (80, 89, 90, 100, 120)
            for dtype in ("bfloat16", "float16", "float32")
        ),
    ],
)
def test_an_indexer_of_real_sizes_compiles(capability: int, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.attention.compile_index", str(capability), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
