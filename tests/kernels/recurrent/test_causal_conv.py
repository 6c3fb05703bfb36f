from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, causal_conv1d_update

from slipstream.kernels import triton_jit
from slipstream.kernels.recurrent.causal_conv import causal_conv
from slipstream.kernels.request_rows import RequestStates
from tests.bundles import bundle
from tests.kernels.triton_cases_delta import Batch, conv_args
from tests.kernels.triton_check import check_kernel, poisoned_allocations, prepared, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
CHANNELS, WIDTH = 6, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def alone(x: Tensor, weight: Tensor, inputs: Tensor, slot: int, position: int, alive: int | None = None) -> Tensor:
    """One request's tokens; of the last ones some may not be alive."""
    alive = x.shape[0] if alive is None else alive
    return causal_conv(
        x, weight, None, inputs, RequestStates(ints(slot), ints(0), ints(alive), ints(position)), x.shape[0]
    )


def numpy_conv(args: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Output and rings of a batch, token by token."""
    x, weight = args["x"].numpy(), args["weight"].numpy()
    out, rings = np.zeros_like(x), args["inputs"].numpy().copy()
    ring, width = rings.shape[1], weight.shape[1]
    for slot, start, count, position in zip(*(args[n].tolist() for n in NAMES), strict=True):
        past = {t: rings[slot, t % ring].copy() for t in range(max(0, position - width + 1), position)}
        past |= {position + i: x[start + i] for i in range(count)}
        for i in range(count):
            total = np.zeros(x.shape[1]) if args["bias"] is None else args["bias"].numpy().copy()
            for back in range(width):
                total += weight[:, width - 1 - back] * past.get(position + i - back, 0.0)
            out[start + i] = total / (1 + np.exp(-total))
            rings[slot, (position + i) % ring] = x[start + i]
    return out, rings


NAMES = ("slots", "starts", "counts", "positions")


@pytest.mark.parametrize("num_reqs", [1, 2, 7, 40])
@pytest.mark.parametrize("most", [1, 4, 60])
def test_batches(num_reqs: int, most: int) -> None:
    counts, gaps = torch.randint(0, most + 1, (num_reqs,)).tolist(), tuple(torch.randint(0, 3, (num_reqs,)).tolist())
    batch = Batch(counts, torch.randint(0, 9, (num_reqs,)).tolist(), gaps, ahead=1, spare=2, padding=3)
    _, args = prepared(conv_args(batch, CHANNELS, WIDTH, 7, bias=num_reqs == 7), torch.float64, "cpu")
    out, rings = numpy_conv(args)
    np.testing.assert_allclose(causal_conv(**bundle(causal_conv, args)).numpy(), out, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(args["inputs"].numpy(), rings)


def test_convolution_is_transformers() -> None:
    x, weight, bias = torch.randn(20, CHANNELS), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    expected = causal_conv1d_fn(x.T[None], weight, bias, "silu")[0].T
    inputs, requests = torch.full((2, 5, CHANNELS), torch.nan), (ints(1), ints(0))
    whole = causal_conv(x, weight, bias, inputs, RequestStates(*requests, ints(20), ints(0)), 20)
    torch.testing.assert_close(whole, expected)
    state, token = x.T[None, :, -WIDTH:].clone(), torch.randn(1, CHANNELS)
    expected = causal_conv1d_update(token.T[None], state, weight, bias, "silu")[0].T
    last = causal_conv(token, weight, bias, inputs, RequestStates(*requests, ints(1), ints(20)), 1)
    torch.testing.assert_close(last, expected)


def speculated(x: Tensor, weight: Tensor, inputs: Tensor, drafts: int) -> Tensor:
    """A prompt, then steps whose drafts are partly wrong, and continue after the right ones."""
    made, position = [alone(x[:9], weight, inputs, 1, 0)], 9
    while position < x.shape[0]:
        right = min(int(torch.randint(1, drafts + 2, ())), x.shape[0] - position)
        wrong = int(torch.randint(0, drafts + 2 - right, ()))
        unused = drafts + 1 - right - wrong
        tokens = torch.cat([x[position : position + right], torch.full((wrong + unused, CHANNELS), 99.0).to(x)])
        out = alone(tokens, weight, inputs, 1, position, right + wrong)
        assert not out[right + wrong :].any()
        made.append(out[:right])
        position += right
    return torch.cat(made)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_rejected_drafts_leave_no_trace(drafts: int) -> None:
    x, weight = torch.randn(60, CHANNELS).double(), torch.randn(CHANNELS, WIDTH).double()
    # No entry more than needed: what the convolution reaches back to, and the tokens of a step.
    inputs = torch.full((3, WIDTH - 1 + drafts + 1, CHANNELS), torch.nan).double()
    plain = alone(x, weight, torch.zeros_like(inputs), 1, 0)
    torch.testing.assert_close(speculated(x, weight, inputs, drafts), plain)
    assert inputs[[0, 2]].isnan().all()


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [3, 47], [20, 1, 2, 27], [4, 17, 16, 13]])
@pytest.mark.parametrize(
    "interpret", [False, pytest.param(True, marks=needs_triton)], ids=["definition", "interpreted"]
)
def test_a_prompt_in_pieces(pieces: list[int], interpret: bool) -> None:
    if interpret and len(pieces) > 9:
        pieces = [1] * 6 + [44]
    x, weight = torch.randn(50, CHANNELS), torch.randn(CHANNELS, WIDTH)
    expected = causal_conv1d_fn(x.T[None], weight, None, "silu")[0].T
    inputs, made, position = torch.full((2, 5, CHANNELS), torch.nan), [], 0
    for tokens in torch.split(x, pieces):
        if interpret:
            with quietly_interpreted(), poisoned_allocations():
                made.append(alone(tokens, weight, inputs, 1, position))
        else:
            made.append(alone(tokens, weight, inputs, 1, position))
        position += len(tokens)
    torch.testing.assert_close(torch.cat(made), expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_kernel_rejected_drafts_leave_no_trace() -> None:
    x, weight = torch.randn(30, CHANNELS), torch.randn(CHANNELS, WIDTH)
    inputs = torch.full((3, WIDTH - 1 + 4, CHANNELS), torch.nan)
    plain = alone(x, weight, torch.zeros_like(inputs), 1, 0)
    with quietly_interpreted(), poisoned_allocations():
        made = speculated(x, weight, inputs, 3)
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
    assert inputs[[0, 2]].isnan().all()


@needs_triton
@pytest.mark.parametrize("most", [3, 40])
def test_kernel_of_many_requests(most: int) -> None:
    counts = torch.randint(0, most + 1, (15,)).tolist()
    batch = Batch(counts, torch.randint(0, 9, (15,)).tolist(), (1,) * 15, ahead=1, spare=2, padding=3)
    check_kernel(causal_conv, conv_args(batch, CHANNELS, WIDTH, 7), torch.float32)


@needs_triton
def test_kernel_reads_rows_that_lie_apart() -> None:
    joint, weight = torch.randn(40, 30), torch.randn(10, WIDTH)
    inputs, requests = torch.randn(4, 6, 10), RequestStates(ints(2, 1), ints(0, 3), ints(2, 37), torch.tensor([7, 0]))
    expected_inputs = inputs.clone()
    expected = causal_conv(joint[:, 15:25], weight, None, expected_inputs, requests, 37)
    with quietly_interpreted(), poisoned_allocations():
        made = causal_conv(joint[:, 15:25], weight, None, inputs, requests, 37)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs, expected_inputs)
