"""Cases of gated delta nets, for ``triton_cases``: convolution, delta rule, gated norm.

Memory that must not be read holds NaN: padding rows, unused slots, entries of rings without a state yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.recurrent.causal_conv import causal_conv
from slipstream.kernels.recurrent.delta_rule import chunked_delta_rule, recurrent_delta_rule
from slipstream.kernels.recurrent.gated_norm import gated_norm
from tests.kernels.triton_check import Case, Real


class Batch(NamedTuple):
    counts: list[int]  # living tokens of each request
    positions: list[int]
    gaps: tuple[int, ...] = ()  # padding rows after the tokens of each
    ahead: int = 0  # and in front of all
    spare: int = 0  # and after all
    padding: int = 0  # padding requests

    @property
    def num_tokens(self) -> int:
        return self.ahead + sum(self.counts) + sum(self.gaps) + self.spare

    def starts(self) -> list[int]:
        """Of each request, and where the last one and what it leaves empty ends."""
        starts = [self.ahead]
        for count, gap in zip(self.counts, self.gaps or [0] * len(self.counts), strict=True):
            starts.append(starts[-1] + count + gap)
        return starts

    def requests(self) -> dict[str, Tensor]:
        *starts, end = self.starts()
        slots = (1 + torch.randperm(len(self.counts) + 2)[: len(self.counts)]).tolist()
        zeros = [0] * self.padding
        return {
            "slots": torch.tensor([*slots, *zeros], dtype=torch.int32),
            "starts": torch.tensor([*starts, *[end] * self.padding], dtype=torch.int32),
            "counts": torch.tensor([*self.counts, *zeros], dtype=torch.int32),
            "positions": torch.tensor([*self.positions, *zeros], dtype=torch.int32),
        }

    def rows(self, width: int) -> Tensor:
        made = torch.full((self.num_tokens, width), torch.nan)
        for start, count in zip(self.starts(), self.counts, strict=False):
            made[start : start + count] = torch.randn(count, width)
        return made


def conv_args(batch: Batch, channels: int, width: int, ring: int, bias: bool = False) -> dict[str, Any]:
    requests = batch.requests()
    inputs = torch.full((len(batch.counts) + 3, ring, channels), torch.nan)
    for slot, position in zip(requests["slots"].tolist(), batch.positions, strict=False):
        for earlier in range(max(0, position - width + 1), position):
            inputs[slot, earlier % ring] = torch.randn(channels)
    return {
        "x": Real(batch.rows(channels)),
        "weight": Real(torch.randn(channels, width)),
        "bias": Real(torch.randn(channels)) if bias else None,
        "inputs": Real(inputs),
        **requests,
        "max_count": max(batch.counts, default=1),
    }


class Sizes(NamedTuple):
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    ring: int


def rule_args(batch: Batch, sizes: Sizes) -> dict[str, Any]:
    requests = batch.requests()
    shape = (sizes.v_heads, sizes.k_dim, sizes.v_dim)
    states = torch.full((len(batch.counts) + 3, sizes.ring, *shape), torch.nan)
    for slot, position in zip(requests["slots"].tolist(), batch.positions, strict=False):
        if position > 0:
            states[slot, position % sizes.ring] = torch.randn(shape)
    return {
        "qkv": Real(batch.rows(2 * sizes.k_heads * sizes.k_dim + sizes.v_heads * sizes.v_dim)),
        "a": Real(batch.rows(sizes.v_heads)),
        "b": Real(batch.rows(sizes.v_heads)),
        "a_log": (0.01 + 4 * torch.rand(sizes.v_heads)).log(),
        "dt_bias": Real(torch.randn(sizes.v_heads)),
        "states": states,
        **requests,
    }


DECODE = Batch([1, 1, 1], [0, 1, 77])
VERIFY = Batch([3, 1, 0, 4], [0, 2, 9, 131], gaps=(1, 3, 4, 0), spare=8, padding=2)
PROMPTS = Batch([5, 2, 66, 1], [0, 8, 3, 0], gaps=(0, 2, 1, 0), spare=3, padding=2)


def convolutions() -> Iterator[Case]:
    for name, batch, channels, width, ring, bias in (
        ("decode", DECODE, 80, 4, 4, False),
        ("verify", VERIFY, 80, 4, 7, True),
        ("prompts", PROMPTS, 80, 4, 7, False),
        ("ring-as-long-as-it-reaches", Batch([40, 1, 2, 3], [3, 30, 31, 2]), 80, 4, 3, False),
        ("ahead", Batch([2, 33], [0, 1], ahead=70), 200, 3, 5, False),
        ("padding-only", Batch([], [], spare=5, padding=2), 80, 4, 4, False),
    ):

        def args(
            batch: Batch = batch, channels: int = channels, width: int = width, ring: int = ring, bias: bool = bias
        ) -> dict[str, Any]:
            return conv_args(batch, channels, width, ring, bias)

        yield Case(f"causal_conv-{name}", causal_conv, args)


SMALL = Sizes(k_heads=1, v_heads=2, k_dim=24, v_dim=20, ring=4)
ODD = Sizes(k_heads=3, v_heads=3, k_dim=24, v_dim=40, ring=1)
REAL = Sizes(k_heads=2, v_heads=4, k_dim=128, v_dim=128, ring=4)


def recurrences() -> Iterator[Case]:
    for name, batch, sizes in (
        ("decode", DECODE, SMALL),
        ("decode-odd", DECODE, ODD),
        ("verify", VERIFY, SMALL),
        ("verify-real", Batch([3], [9]), REAL),
        ("longer-than-the-ring", Batch([9, 3], [5, 0], ahead=2, spare=20), SMALL),
        ("padding-only", Batch([], [], spare=5, padding=2), SMALL),
    ):

        def args(batch: Batch = batch, sizes: Sizes = sizes) -> dict[str, Any]:
            return rule_args(batch, sizes) | {"max_count": max(batch.counts, default=1)}

        yield Case(f"recurrent_delta_rule-{name}", recurrent_delta_rule, args)


def chunks() -> Iterator[Case]:
    for name, batch, sizes in (
        ("prompts", PROMPTS, SMALL),
        ("prompt-real", Batch([20], [6]), REAL),
        ("prompt-narrow-values", Batch([70], [3]), Sizes(k_heads=1, v_heads=2, k_dim=64, v_dim=24, ring=3)),
        ("short", VERIFY, SMALL),
        ("ahead", Batch([5, 20], [0, 1], ahead=130, spare=1), SMALL),
    ):

        def args(batch: Batch = batch, sizes: Sizes = sizes) -> dict[str, Any]:
            return rule_args(batch, sizes)

        yield Case(f"chunked_delta_rule-{name}", chunked_delta_rule, args)

    def one_token_again_and_again() -> dict[str, Any]:
        # All keys are the same and nothing is forgotten: powers of the system would be as large as 10^18.
        args = rule_args(Batch([70], [0]), SMALL)
        args["qkv"] = Real(torch.randn(1, args["qkv"].tensor.shape[1]).repeat(70, 1))
        return args | {"a": Real(torch.full((70, 2), -12.0)), "b": Real(torch.full((70, 2), 5.0))}

    def much_forgotten() -> dict[str, Any]:
        return rule_args(Batch([70], [3]), SMALL) | {"a": Real(60 * torch.randn(70, 2)), "a_log": torch.ones(2) * 3}

    def no_keys() -> dict[str, Any]:
        args = rule_args(Batch([20], [3]), SMALL)
        args["qkv"].tensor[3:15, :48] *= 1e-4
        return args

    yield Case("chunked_delta_rule-one-token-again-and-again", chunked_delta_rule, one_token_again_and_again)
    yield Case("chunked_delta_rule-much-forgotten", chunked_delta_rule, much_forgotten)
    yield Case("chunked_delta_rule-no-keys", chunked_delta_rule, no_keys)


def gated_norms() -> Iterator[Case]:
    for shape in ((1, 1), (37, 80), (3, 5, 128), (2, 1500), (0, 64)):

        def args(shape: tuple[int, ...] = shape) -> dict[str, Any]:
            weight = Real(torch.randn(shape[-1]))
            return {"x": Real(torch.randn(shape)), "gate": Real(3 * torch.randn(shape)), "weight": weight, "eps": 1e-6}

        yield Case(f"gated_norm-{'x'.join(map(str, shape))}", gated_norm, args)


def of_qwen3_next() -> Iterator[Case]:
    """Of its layers' own sizes, to compile: so many heads would take the interpreter long."""
    sizes = Sizes(k_heads=16, v_heads=32, k_dim=128, v_dim=128, ring=4)
    channels = 2 * sizes.k_heads * sizes.k_dim + sizes.v_heads * sizes.v_dim
    checked = Batch([4, 1], [9, 70], gaps=(0, 3))
    for name, batch, ring in (("decode", DECODE, 1), ("verify", checked, 4), ("prompts", PROMPTS, 4)):
        own = sizes._replace(ring=ring)

        def conv(batch: Batch = batch, ring: int = ring) -> dict[str, Any]:
            return conv_args(batch, channels, 4, 3 + ring)

        def rule(batch: Batch = batch, own: Sizes = own) -> dict[str, Any]:
            return rule_args(batch, own)

        def recurrence(batch: Batch = batch, own: Sizes = own) -> dict[str, Any]:
            return rule_args(batch, own) | {"max_count": max(batch.counts)}

        yield Case(f"causal_conv-qwen3-next-{name}", causal_conv, conv)
        if name == "prompts":
            yield Case(f"chunked_delta_rule-qwen3-next-{name}", chunked_delta_rule, rule)
        else:
            yield Case(f"recurrent_delta_rule-qwen3-next-{name}", recurrent_delta_rule, recurrence)
