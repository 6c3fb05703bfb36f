"""Decoding over latents against float64, token by token, and against attention with keys and values made from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import latent_parts
from slipstream.kernels.attention.latent_decode import LatentQueries, latent_decode
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.linear.head_products import project_heads
from tests.bundles import bundle
from tests.kernels.attention.dense_latents import dense_decode, entries_of
from tests.kernels.triton_cases_latent import DECODES, SMALL, Batch, Sizes, decode_args, draw_cache, scheduled
from tests.kernels.triton_check import TOLERANCE, Real, poisoned_allocations, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
REQUESTS = PagedRequests._fields
# So that few keys have many parts, whose ends no block of keys is made for.
TINY = ((3, 2), (5, 3), (20, 1 << 18))


def drawn(batch: Batch, sizes: Sizes, **more: int) -> dict[str, Any]:
    torch.manual_seed(1)
    args = decode_args(batch, sizes, **more)
    return {key: value.tensor if isinstance(value, Real) else value for key, value in args.items()}


def decode(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted(), poisoned_allocations():
        return latent_decode.body(**bundle(latent_decode, args))


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_parts, "LADDER", TINY)


@pytest.mark.parametrize("name", DECODES)
def test_definition_is_a_sum_over_what_is_seen(name: str) -> None:
    args = drawn(*DECODES[name])
    requests = {field: args[field] for field in REQUESTS}
    expected = dense_decode((args["latent"], args["rope"]), args["cache"], requests, 17, args["scale"])
    wide = {key: args[key].double() for key in ("latent", "rope", "cache")}
    actual = latent_decode(**bundle(latent_decode, args | wide))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@needs_triton
@pytest.mark.usefixtures("tiny_parts")
@pytest.mark.parametrize("name", ["pairs", "mixed", "starts"])
def test_kernel_with_parts_of_any_size(name: str) -> None:
    args = drawn(*DECODES[name], num_programs=5)
    assert args["part_starts"][-1] > 16
    requests = {field: args[field] for field in REQUESTS}
    expected = dense_decode((args["latent"], args["rope"]), args["cache"], requests, 17, args["scale"])
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(decode(args).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [3, 16])
def test_absorbed_is_attention_with_keys_and_values_made_from_latents(heads: int) -> None:
    batch, sizes = Batch([3, 1, 4], [40, 9, 4]), SMALL._replace(heads=heads)
    requests = batch.requests(sizes.page_size)
    cache = draw_cache(requests, sizes).double()
    up_key = torch.randn(heads, sizes.nope, sizes.latent, dtype=torch.float64)
    up_value = torch.randn(heads, sizes.value, sizes.latent, dtype=torch.float64)
    nope = torch.randn(8, heads, sizes.nope, dtype=torch.float64)
    rope = torch.randn(8, heads, sizes.rope, dtype=torch.float64)
    scale = 1.3 * (sizes.nope + sizes.rope) ** -0.5

    q = LatentQueries(project_heads(nope, up_key), rope)
    own = PagedRequests(**requests)
    absorbed = latent_decode(q, cache, own, scheduled(requests, 17, 3), 4, 3, scale)
    actual = project_heads(absorbed, up_value.transpose(1, 2))

    first = 0
    for i, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        latents, rotated = entries_of(cache, requests, i).split([sizes.latent, sizes.rope], dim=1)
        keys = torch.cat([torch.einsum("kl,hpl->hkp", latents, up_key), rotated.expand(heads, -1, -1)], dim=2)
        values = torch.einsum("kl,hvl->hkv", latents, up_value)
        tokens = slice(first, first + count)
        queries = torch.cat([nope[tokens], rope[tokens]], dim=2).transpose(0, 1)
        sees = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        expected = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sees, scale=scale)
        torch.testing.assert_close(actual[tokens], expected.transpose(0, 1), rtol=1e-10, atol=1e-10)
        first += count


@needs_triton
@pytest.mark.usefixtures("tiny_parts")
@pytest.mark.parametrize("name", ["pairs", "verify", "starts", "mixed"])
def test_bits_do_not_depend_on_the_programs(name: str) -> None:
    batch, sizes = DECODES[name]
    expected = decode(drawn(batch, sizes, num_programs=1))
    for num_programs in (2, 13):
        assert torch.equal(decode(drawn(batch, sizes, num_programs=num_programs)), expected)


@needs_triton
@pytest.mark.usefixtures("tiny_parts")
@pytest.mark.parametrize("name", ["pairs", "starts"])
def test_a_request_does_not_depend_on_its_batch(name: str) -> None:
    """Bit for bit, alone and among others."""
    args = drawn(*DECODES[name])
    together, starts = decode(args), args["query_start_loc"].tolist()
    for i in range(len(DECODES[name][0].seq_lens)):
        tokens = slice(starts[i], starts[i + 1])
        own = {field: None if args[field] is None else args[field][i : i + 1] for field in REQUESTS[1:]}
        own["query_start_loc"] = torch.tensor([0, starts[i + 1] - starts[i]], dtype=torch.int32)
        alone = args | own | {"latent": args["latent"][tokens], "rope": args["rope"][tokens]}
        assert torch.equal(decode(alone | scheduled(own, 17, 2)._asdict()), together[tokens])
