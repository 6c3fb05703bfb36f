from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from slipstream.device.operation import Operation
from slipstream.kernels import triton_jit
from slipstream.kernels.recurrent.causal_conv import causal_conv
from slipstream.kernels.recurrent.delta_rule import DeltaTokens, chunked_delta_rule, recurrent_delta_rule
from slipstream.kernels.recurrent.gated_norm import gated_norm
from slipstream.kernels.request_rows import RequestStates
from tests.bundles import bundle
from tests.kernels.triton_cases_delta import Batch, Sizes, rule_args
from tests.kernels.triton_check import check_kernel, poisoned_allocations, prepared, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
HEADS = [(1, 1), (2, 4), (3, 3), (1, 3)]
NAMES = ("slots", "starts", "counts", "positions")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def numpy_rule(args: dict[str, Any], keeps_all: bool) -> tuple[np.ndarray, np.ndarray]:
    """Output and states of a batch, token by token and head by head."""
    qkv, a, b, a_log, dt_bias, states = (args[n].double().numpy() for n in list(args)[:6])
    states = states.copy()
    _, ring, v_heads, k_dim, v_dim = states.shape
    k_heads = (qkv.shape[1] - v_heads * v_dim) // (2 * k_dim)
    out = np.zeros((len(qkv), v_heads, v_dim))
    for slot, start, count, position in zip(*(args[n].tolist() for n in NAMES), strict=True):
        for head in range(v_heads):
            state = states[slot, position % ring, head].copy() if position else np.zeros((k_dim, v_dim))
            for i in range(count):
                row, first = qkv[start + i], head * k_heads // v_heads * k_dim
                q, k = row[first:][:k_dim], row[k_heads * k_dim + first :][:k_dim]
                v = row[2 * k_heads * k_dim + head * v_dim :][:v_dim]
                q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(k_dim), k / np.sqrt(k @ k + 1e-6)
                softplus = np.log1p(np.exp(a[start + i, head] + dt_bias[head]))
                state = state * np.exp(-np.exp(a_log[head]) * softplus)
                state = state + np.outer(k, (v - k @ state) / (1 + np.exp(-b[start + i, head])))
                out[start + i, head] = q @ state
                if i == count - 1 or keeps_all or count <= ring:
                    states[slot, (position + i + 1) % ring, head] = state
    return out, states


def drawn(most: int, num_reqs: int, sizes: Sizes) -> dict[str, Any]:
    counts, gaps = torch.randint(0, most + 1, (num_reqs,)).tolist(), tuple(torch.randint(0, 3, (num_reqs,)).tolist())
    batch = Batch(counts, torch.randint(0, 9, (num_reqs,)).tolist(), gaps, ahead=1, spare=2, padding=3)
    return rule_args(batch, sizes)


@pytest.mark.parametrize(("num_reqs", "most"), [(1, 1), (1, 140), (2, 70), (7, 4), (40, 12)])
@pytest.mark.parametrize(("k_heads", "v_heads"), HEADS)
@pytest.mark.parametrize("op", [recurrent_delta_rule, chunked_delta_rule], ids=lambda op: op.name)
def test_batches(op: Operation[..., Tensor], k_heads: int, v_heads: int, num_reqs: int, most: int) -> None:
    _, args = prepared(drawn(most, num_reqs, Sizes(k_heads, v_heads, 5, 7, 4)), torch.float64, "cpu")
    args["states"] = args["states"].double()
    out, states = numpy_rule(args, keeps_all=op is recurrent_delta_rule)
    limit = {"max_count": most} if op is recurrent_delta_rule else {}
    np.testing.assert_allclose(op(**bundle(op, args | limit)).numpy(), out, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(args["states"].numpy(), states, rtol=1e-9, atol=1e-9)


class Request:
    """Tokens of one request, and steps over any of them."""

    def __init__(self, num_tokens: int, sizes: Sizes, dtype: torch.dtype = torch.float64) -> None:
        self.sizes = sizes
        width = 2 * sizes.k_heads * sizes.k_dim + sizes.v_heads * sizes.v_dim
        self.qkv = torch.randn(num_tokens, width, dtype=dtype)
        # Slices of one product, as a layer has them.
        self.a, self.b = torch.randn(num_tokens, 2 * sizes.v_heads, dtype=dtype).chunk(2, dim=1)
        self.a_log, self.dt_bias = torch.rand(sizes.v_heads, dtype=dtype), torch.randn(sizes.v_heads, dtype=dtype)
        shape = (3, sizes.ring, sizes.v_heads, sizes.k_dim, sizes.v_dim)
        self.states = torch.full(shape, torch.nan, dtype=torch.promote_types(dtype, torch.float32))

    def step(self, first: int, count: int, chunked: bool, wrong: int = 0, unused: int = 0) -> Tensor:
        """From the first token on so many, then drafts that are wrong, then drafts that are not there."""
        rows = slice(first, first + count)
        tokens = [self.qkv[rows], self.a[rows], self.b[rows]]
        if wrong + unused:
            junk = [torch.full((wrong + unused, t.shape[1]), 9.0, dtype=t.dtype) for t in tokens]
            tokens = [torch.cat(pair) for pair in zip(tokens, junk, strict=True)]
        described = RequestStates(ints(1), ints(0), ints(count + wrong), ints(first))
        args = (DeltaTokens(*tokens, self.a_log, self.dt_bias), self.states, described)
        out = chunked_delta_rule(*args) if chunked else recurrent_delta_rule(*args, count + wrong + unused)
        assert not out[count + wrong :].any()
        return out[:count]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs and last state, by transformers, which computes in float32."""
        s = self.sizes
        q, k, v = self.qkv.float().split([s.k_heads * s.k_dim] * 2 + [s.v_heads * s.v_dim], dim=1)
        q, k = (t.view(1, -1, s.k_heads, s.k_dim).repeat_interleave(s.v_heads // s.k_heads, dim=2) for t in (q, k))
        g = -self.a_log.exp() * torch.nn.functional.softplus(self.a + self.dt_bias)
        args = (q, k, v.view(1, -1, s.v_heads, s.v_dim), g.float()[None], self.b.sigmoid().float()[None])
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, state = torch_recurrent_gated_delta_rule(*args, **options)
        same, same_state = torch_chunk_gated_delta_rule(*args, **options)
        torch.testing.assert_close(same, out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(same_state, state, rtol=1e-4, atol=1e-4)
        return out[0], state[0]

    def state(self, position: int) -> Tensor:
        return self.states[1, position % self.sizes.ring]

    def check(self, out: Tensor) -> None:
        expected, state = self.expected()
        torch.testing.assert_close(out.float(), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(self.state(self.qkv.shape[0]).float(), state, rtol=5e-5, atol=5e-5)
        assert self.states[[0, 2]].isnan().all()


PIECES = [[130], [64, 66], [1, 129], [63, 1, 3, 63], [2, 2, 126], [100, 1, 1, 1, 2, 25]]


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize(("k_heads", "v_heads"), HEADS)
def test_a_prompt_in_pieces_is_transformers(pieces: list[int], k_heads: int, v_heads: int) -> None:
    request, made, position = Request(130, Sizes(k_heads, v_heads, 8, 12, 2)), [], 0
    for count in pieces:
        made.append(request.step(position, count, chunked=count > 1))
        position += count
    request.check(torch.cat(made))


def speculated(request: Request, prompt: int) -> Tensor:
    """A prompt, then steps whose drafts are partly wrong, alone or among prompts, continued after the right ones."""
    num_tokens, width = request.qkv.shape[0], request.sizes.ring
    made, position = [request.step(0, prompt, chunked=True)], prompt
    while position < num_tokens:
        right = min(int(torch.randint(1, width + 1, ())), num_tokens - position)
        wrong = int(torch.randint(0, width + 1 - right, ()))
        among_prompts = bool(torch.randint(0, 3, ()) == 0)
        made.append(request.step(position, right, among_prompts, wrong, unused=width - right - wrong))
        position += right
    return torch.cat(made)


@pytest.mark.parametrize("drafts", [0, 1, 3, 6])
@pytest.mark.parametrize("prompt", [1, 5, 90])
def test_rejected_drafts_leave_no_trace(drafts: int, prompt: int) -> None:
    request = Request(prompt + 40, Sizes(1, 2, 8, 12, drafts + 1))
    request.check(speculated(request, prompt))


@needs_triton
def test_kernels_over_a_prompt_in_pieces_and_drafts() -> None:
    request = Request(85, Sizes(1, 2, 16, 16, 3), torch.float32)
    with quietly_interpreted(), poisoned_allocations():
        made = speculated(request, prompt=67)
    request.check(made)


@needs_triton
@pytest.mark.parametrize("op", [recurrent_delta_rule, chunked_delta_rule], ids=lambda op: op.name)
def test_kernel_of_many_requests(op: Operation[..., Tensor]) -> None:
    few = op is recurrent_delta_rule
    args = drawn(4 if few else 5, 24, Sizes(1, 1, 16, 16, 4))
    check_kernel(op, args | ({"max_count": 4} if few else {}))


@needs_triton
@pytest.mark.parametrize("op", [recurrent_delta_rule, chunked_delta_rule], ids=lambda op: op.name)
def test_kernels_read_rows_that_lie_apart(op: Operation[..., Tensor]) -> None:
    joint, requests = torch.randn(12, 160), RequestStates(ints(1, 2), ints(0, 8), ints(7, 3), torch.tensor([5, 0]))
    rows = DeltaTokens(joint[:, 7:135], joint[:, 135:139], joint[:, 150:154], torch.rand(4), torch.randn(4))
    limit = (7,) if op is recurrent_delta_rule else ()
    expected_states = torch.randn(3, 3, 4, 16, 16)
    states = expected_states.clone()
    expected = op(rows, expected_states, requests, *limit)
    with quietly_interpreted(), poisoned_allocations():
        made = op(rows, states, requests, *limit)
    torch.testing.assert_close(made, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states, expected_states, rtol=2e-5, atol=2e-5)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, as long as they go token by token."""
    args = drawn(4, 9, Sizes(1, 2, 8, 8, 4))
    _, args = prepared(args | {"max_count": 4}, torch.float32, "cpu")
    together = recurrent_delta_rule(**bundle(recurrent_delta_rule, {**args, "states": args["states"].clone()}))
    for i in range(9):
        one = args | {name: args[name][i : i + 1] for name in NAMES} | {"states": args["states"].clone()}
        rows = slice(int(args["starts"][i]), int(args["starts"][i] + args["counts"][i]))
        alone = recurrent_delta_rule(**bundle(recurrent_delta_rule, one))
        assert torch.equal(alone[rows], together[rows])


def test_layer_is_transformers() -> None:
    """Convolution, rule and norm between a layer's own products: a prompt in two pieces, then token by token."""
    config = Qwen3NextConfig(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    layer = Qwen3NextGatedDeltaNet(config, 0).float()
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.dt_bias)
    hidden = torch.randn(1, 80, 24)
    with torch.no_grad():
        expected = layer(hidden)[0]
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        q, k, v, z, b, a = (t[0].flatten(1) for t in parts)
        x, weight = torch.cat([q, k, v], dim=1), layer.conv1d.weight.squeeze(1)
        inputs, states = torch.full((2, 4, x.shape[1]), torch.nan), torch.full((2, 1, 4, 8, 6), torch.nan)
        made = []
        for first, end in ((0, 30), (30, 75), *((i, i + 1) for i in range(75, 80))):
            rows, described = slice(first, end), RequestStates(ints(1), ints(0), ints(end - first), ints(first))
            qkv = causal_conv(x[rows], weight, None, inputs, described, end - first)
            rest = (DeltaTokens(qkv, a[rows], b[rows], layer.A_log, layer.dt_bias), states, described)
            out = chunked_delta_rule(*rest) if end - first > 1 else recurrent_delta_rule(*rest, 1)
            out = gated_norm(out, z[rows].view(-1, 4, 6), layer.norm.weight, layer.norm.variance_epsilon)
            made.append(layer.out_proj(out.flatten(1)))
    torch.testing.assert_close(torch.cat(made), expected, rtol=2e-5, atol=2e-5)
