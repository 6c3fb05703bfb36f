"""Prompts over chunks of keys against float64, token by token, and against decoding over the latents themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention.latent_cache import gather_latents
from slipstream.kernels.attention.latent_decode import LatentQueries, latent_decode
from slipstream.kernels.attention.latent_prompt import PromptKeys, PromptQueries, merge_attention, prompt_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.linear.head_products import project_heads
from tests.bundles import bundle
from tests.kernels.attention.dense_latents import seen_by_tokens
from tests.kernels.triton_cases_latent import (
    PROMPTS,
    SMALL,
    Batch,
    Sizes,
    draw_cache,
    merge_args,
    prompt_args,
    scheduled,
)
from tests.kernels.triton_check import quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
Result = tuple[Tensor, Tensor]


def dense_prompt(q: PromptQueries, keys: PromptKeys, batch: Batch, first_key: int, num_keys: int) -> Result:
    num_tokens, heads, nope = q.nope.shape
    scale = (nope + q.rope.shape[2]) ** -0.5
    out = torch.zeros(num_tokens, heads, keys.up.shape[2] - nope, dtype=torch.float64)
    lse = torch.full((num_tokens, heads), -torch.inf, dtype=torch.float64)
    for token, i, first, end in seen_by_tokens(batch.requests(4)):
        rows = slice(i * num_keys + max(first - first_key, 0), i * num_keys + min(end - first_key, num_keys))
        if rows.start >= rows.stop:
            continue
        own, values = keys.up[rows].double().split([nope, out.shape[2]], dim=2)
        scores = torch.einsum("hp,khp->hk", q.nope[token].double(), own)
        scores = (scores + q.rope[token].double() @ keys.rope[rows].double().T) * scale
        weights = scores.exp()
        lse[token] = weights.sum(1).log()
        out[token] = torch.einsum("hk,khv->hv", weights, values) / weights.sum(1, keepdim=True)
    return out, lse


@pytest.mark.parametrize("name", PROMPTS)
def test_definition_is_a_sum_over_what_is_seen(name: str) -> None:
    torch.manual_seed(0)
    args: dict[str, Any] = prompt_args(*PROMPTS[name])
    q, keys = args["q"].tensor.double(), args["keys"].tensor.double()
    out, lse = prompt_attention.body(**bundle(prompt_attention, args | {"q": q, "keys": keys}))
    expected = dense_prompt(q, keys, PROMPTS[name][0], args["first_key"], args["num_keys"])
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected[1], rtol=1e-10, atol=1e-10)


class _Prompt:
    """Requests of which keys and values are made from latents, chunk by chunk."""

    def __init__(self, batch: Batch, sizes: Sizes, dtype: torch.dtype) -> None:
        self._batch, self._sizes, heads = batch, sizes, sizes.heads
        self._own = batch.requests(sizes.page_size)
        self.requests = PagedRequests(**self._own)
        self._cache = draw_cache(self._own, sizes).to(dtype)
        self._up = torch.randn(heads, sizes.nope + sizes.value, sizes.latent, dtype=dtype) / 5
        q = torch.randn(batch.num_tokens, heads, sizes.nope + sizes.rope, dtype=dtype)
        self._q = PromptQueries(q[..., : sizes.nope], q[..., sizes.nope :])

    def attend(self, first: int, num: int) -> Result:
        latents, rope = gather_latents.body(self._cache, self.requests, first, num, self._sizes.latent)
        up = torch.einsum("kl,hpl->khp", latents, self._up)
        longest = max(self._batch.query_lens)
        return prompt_attention.body(self._q, PromptKeys(up, rope), self.requests, first, num, longest, 0.3, True)

    def in_chunks(self, size: int) -> Result:
        out, lse = self.attend(0, size)
        for first in range(size, max(self._batch.seq_lens), size):
            out, lse = merge_attention.body(out, lse, *self.attend(first, size), out.dtype)
        return out, lse

    def absorbed(self) -> Tensor:
        up_key, up_value = self._up.split([self._sizes.nope, self._sizes.value], dim=1)
        q = LatentQueries(project_heads(self._q.nope, up_key), self._q.rope)
        table, longest = scheduled(self._own, 100, 3), max(self._batch.query_lens)
        out = latent_decode.body(q, self._cache, self.requests, table, longest, 99, 0.3)
        return project_heads(out, up_value.transpose(1, 2))


MANY = Batch([30, 9, 1, 20], [90, 9, 40, 61], padding=1, spare=2)
LATE = MANY._replace(seq_starts=(30, 3, 39, 0))


@pytest.mark.parametrize("batch", [MANY, LATE], ids=["all", "starts"])
@pytest.mark.parametrize("size", [1, 7, 32, 64, 90])
def test_chunks_of_any_size_are_one_and_decoding_over_latents(batch: Batch, size: int) -> None:
    torch.manual_seed(0)
    prompt = _Prompt(batch, SMALL, torch.float64)
    out, lse = prompt.in_chunks(size)
    whole = prompt.attend(0, 90)
    torch.testing.assert_close(out, whole[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, whole[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out, prompt.absorbed(), rtol=1e-10, atol=1e-10)


@needs_triton
def test_kernels_chunk_by_chunk_are_decoding_over_latents() -> None:
    torch.manual_seed(0)
    prompt = _Prompt(LATE, SMALL, torch.float32)
    with quietly_interpreted():
        out, _ = prompt.in_chunks(33)
    torch.testing.assert_close(out, prompt.absorbed(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_is_as_wide_as_asked(dtype: torch.dtype) -> None:
    args = prompt_args(*PROMPTS["whole"])
    real = {name: args[name].tensor.to(dtype) for name in ("q", "keys")}
    for wide, kind in ((True, torch.float32), (False, dtype)):
        out, lse = prompt_attention(**bundle(prompt_attention, args | real | {"wide": wide}))
        assert (out.dtype, lse.dtype) == (kind, torch.float32)


def test_a_part_without_result_is_left_out() -> None:
    torch.manual_seed(0)
    args = merge_args(40, 3, 5, torch.float64)
    args = {key: x.double() if isinstance(x, Tensor) else x for key, x in args.items()}
    out, lse = merge_attention(**args)
    for token in range(40):
        for head in range(3):
            seen = [
                (args[f"{which}_out"][token, head], args[f"{which}_lse"][token, head])
                for which in ("first", "second")
                if args[f"{which}_lse"][token, head].isfinite()
            ]
            total = sum((weight.exp() for _, weight in seen), torch.tensor(0.0))
            expected = sum((part * weight.exp() / total for part, weight in seen), torch.zeros(5))
            torch.testing.assert_close(out[token, head], expected, check_dtype=False)
            torch.testing.assert_close(lse[token, head], total.log(), check_dtype=False)


@needs_triton
@pytest.mark.parametrize("far", [500.0, -500.0])
def test_far_apart_parts_do_not_overflow(far: float) -> None:
    out, lse = torch.randn(2, 3, 4, 8), torch.stack([torch.randn(3, 4), far + torch.randn(3, 4)])
    with quietly_interpreted():
        joined, total = merge_attention.body(out[0], lse[0], out[1], lse[1], torch.float32)
    assert torch.equal(joined, out[int(far > 0)]) and torch.equal(total, lse[int(far > 0)])
