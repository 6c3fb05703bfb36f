from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import decode_attention as module
from tests.bundles import bundle
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_cases_fused import decodes
from tests.kernels.triton_check import TOLERANCE, Real, check_kernel, poisoned_allocations, quietly_interpreted

CASES = {case.name.removeprefix("decode_attention-"): case for case in decodes()}


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize(
    ("name", "programs"),
    [
        *((name, n) for name in ("first-and-later", "verify", "window", "many") for n in (1, 4)),
        *((name, n) for name in ("starts", "starts-verify", "starts-window") for n in (1, 4)),
        ("window", 512),
        ("starts-long", 512),
        ("one", 512),
    ],
)
def test_any_number_of_programs_a_request(monkeypatch: pytest.MonkeyPatch, name: str, programs: int) -> None:
    """Large batches have one program for all keys of a head, small ones many. All must come to the same."""
    monkeypatch.setattr(module, "_WANTED_PROGRAMS", programs)
    torch.manual_seed(0)
    check_kernel(CASES[name].op, CASES[name].args())


def turned(x: Tensor, gain: Tensor | None, args: dict[str, Any]) -> Tensor:
    """Heads as they go into the cache."""
    if gain is not None:
        x = x * (x.square().mean(-1, keepdim=True) + args["eps"]).rsqrt() * gain
    low, high = x.chunk(2, dim=-1)
    return x * args["cos"] + torch.cat([high, low], dim=-1) * args["sin"]


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("starts")])
def test_what_lies_before_the_first_slot_is_not_there(name: str) -> None:
    """Kernel and definition against a sum over the slots that a token sees: for the others hold NaN."""
    torch.manual_seed(0)
    args = {key: x.tensor if isinstance(x, Real) else x for key, x in CASES[name].args().items()}
    wide = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in args.items()}
    query_len, query_lens, page_ids = args["query_len"], args["query_lens"], args["page_ids"]
    alive = (torch.arange(query_len) < query_lens.unsqueeze(1)).flatten()
    q = turned(wide["q"], wide.get("query"), wide)
    keys, cache = turned(wide["k"], wide.get("key"), wide), wide["kv_cache"].clone()
    cache[page_ids[alive], 0, :, args["offsets"][alive]] = keys[alive]
    cache[page_ids[alive], 1, :, args["offsets"][alive]] = wide["v"][alive]
    tables = (torch.arange(len(query_lens) + 1) * query_len, query_lens, args["seq_lens"], args["block_table"])
    expected = dense_attention(q, cache, *tables, args["scale"], args["window"], args["seq_starts"], args["causal"])
    torch.testing.assert_close(
        module.decode_attention.body(**bundle(module.decode_attention, wide)), expected, rtol=1e-10, atol=1e-10
    )
    with quietly_interpreted(), poisoned_allocations():
        actual = module.decode_attention.body(**bundle(module.decode_attention, args)).double()
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_equal_queries_only() -> None:
    args = {name: getattr(value, "tensor", value) for name, value in CASES["verify"].args().items()}
    with triton_jit.interpreted(), pytest.raises(AssertionError, match="pads requests and tokens together"):
        module.decode_attention.body(**bundle(module.decode_attention, {**args, "query_len": 3}))
