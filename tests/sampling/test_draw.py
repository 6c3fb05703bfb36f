"""The definition of a draw. Its kernel is held to it in test_triton.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.triton_jit import jit, tl
from slipstream.sampling.draw import DrawKeys, draw_drafts, draw_tokens
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_at, gumbel_block, gumbel_noise, gumbel_noise_at
from tests.bundles import bundle
from tests.kernels.triton_check import Real, poisoned_allocations, quietly_interpreted
from tests.sampling.test_gumbel import seeds_of
from tests.sampling.triton_cases import draft_args, draw_args, reduced_draw_args, some_ids

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
BOTH = pytest.mark.parametrize("as_kernel", [False, pytest.param(True, marks=needs_triton)], ids=["torch", "triton"])


def draw(logits: Tensor, temperature: list[float], noise: bool = True, scaled: bool = False) -> tuple[Tensor, Tensor]:
    """Row i of the logits is drawn for request row i, at position i."""
    n = len(logits)
    order = torch.arange(n, dtype=torch.int32)
    keys = DrawKeys(torch.tensor(temperature), seeds_of(*[123456789] * n), order, torch.zeros_like(order))
    return draw_tokens(logits, order, keys, noise, scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
def test_ties_go_to_the_lowest_id_and_bad_rows_stay_inside_the_vocabulary(dtype: torch.dtype) -> None:
    rows = [[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3]
    for noise in (False, True):
        token_ids, failed = draw(torch.tensor(rows, dtype=dtype), [0.0] * 5, noise)
        assert token_ids.tolist() == [1, 0, 0, 2, 0]
        assert failed.tolist() == [False, False, True, True, True]
    assert draw(torch.tensor(rows, dtype=dtype), [1.0] * 5)[0].tolist()[-1] == 0


def test_the_argmax_with_noise_draws_from_the_softmax() -> None:
    """Chi-square over many positions of one seed."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5, 0.5])
    trials = 40_000
    for scaled in (False, True):
        token_ids, failed = draw(logits.repeat(trials, 1), [0.8] * trials, scaled=scaled)
        assert not failed.any()
        counts = torch.bincount(token_ids, minlength=7).double()
        expected = (logits / (1.0 if scaled else 0.8)).softmax(0).double() * trials
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 22.46  # 0.1 % level at six degrees of freedom


def test_greedy_rows_get_no_noise() -> None:
    logits = 1e-3 * torch.randn(200, 50)
    token_ids, _ = draw(logits, [0.0, 0.7] * 100)
    assert torch.equal(token_ids[::2], logits[::2].argmax(1))
    assert not torch.equal(token_ids[1::2], logits[1::2].argmax(1))


def test_rows_are_read_through_the_batch() -> None:
    """Two logits rows for three request rows, in another order."""
    logits, rows = torch.zeros(2, 100), torch.tensor([2, 0], dtype=torch.int32)
    seeds, position = seeds_of(5, 6, 2**64 - 7), torch.tensor([9, 2**31 - 1], dtype=torch.int32)
    choice = torch.tensor([0, 1, 2], dtype=torch.int32)
    token_ids, _ = draw_tokens(logits, rows, DrawKeys(torch.ones(3), seeds, position, choice), noise=True, scaled=False)
    assert token_ids.tolist() == gumbel_noise(seeds[[2, 0]], position, choice[[2, 0]], 100).argmax(1).tolist()


def test_a_tiny_temperature_is_greedy_and_no_failure() -> None:
    logits = torch.tensor([[5.0, 20.0, -3.0]])
    token_ids, failed = draw(logits, [1e-44])
    assert token_ids.tolist() == [1]
    assert failed.tolist() == [False]


def run(args: dict[str, Any], as_kernel: bool) -> tuple[Tensor, Tensor]:
    plain = {name: value.tensor if isinstance(value, Real) else value for name, value in args.items()}
    arguments = bundle(draw_tokens, plain)
    if not as_kernel:
        return draw_tokens(**arguments)
    with quietly_interpreted(), poisoned_allocations():
        return draw_tokens.body(**arguments)


def over_the_whole_vocabulary(args: dict[str, Any], vocab_size: int) -> list[int]:
    """The definition by hand: tokens that the drafter does not know are forbidden ones."""
    given, owners = args["logits"].tensor.double(), args["batch_rows"].long()
    logits = torch.full((len(given), vocab_size), -torch.inf).double()
    logits[:, args["target_ids"].long()] = torch.where(given < torch.inf, given, -torch.inf)
    nothing = logits.amax(1) == -torch.inf
    temperature = args["temperature"][owners].double().unsqueeze(1)
    noise = gumbel_noise(args["seeds"][owners], args["positions"], args["choice"][owners], vocab_size, args["purpose"])
    sampled = logits / torch.where(temperature > 0, temperature, 1.0) + torch.where(temperature > 0, noise, 0.0)
    best = (sampled if args["noise"] else logits).argmax(1)
    return torch.where(nothing, int(args["target_ids"][0]), best).tolist()


@BOTH
@pytest.mark.parametrize("purpose", [TARGET_NOISE, 1])
@pytest.mark.parametrize(("count", "vocab_size"), [(1, 1), (1, 9), (7, 9), (7, 512), (300, 512), (4097, 5000)])
def test_a_reduced_vocabulary_is_the_whole_one_with_the_rest_forbidden(
    count: int, vocab_size: int, purpose: int, as_kernel: bool
) -> None:
    torch.manual_seed(count)
    for noise in (False, True):
        args = {**reduced_draw_args(9, count, vocab_size, noise), "purpose": purpose}
        assert len(set((args["temperature"][args["batch_rows"].long()] > 0).tolist())) == 2  # greedy and sampled rows
        token_ids, failed = run(args, as_kernel)
        assert token_ids.tolist() == over_the_whole_vocabulary(args, vocab_size)
        assert failed.tolist() == run({**args, "target_ids": None}, as_kernel)[1].tolist()


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 7, 512, 5003])
def test_all_ids_in_their_order_are_no_ids(vocab_size: int, as_kernel: bool) -> None:
    torch.manual_seed(0)
    for noise in (False, True):
        args = draw_args(torch.randn(6, vocab_size), noise)
        named = {**args, "target_ids": torch.arange(vocab_size, dtype=torch.int32)}
        for plain, other in zip(run(args, as_kernel), run(named, as_kernel), strict=True):
            assert torch.equal(plain, other)


def test_noise_of_some_tokens_is_theirs() -> None:
    """Bit for bit, all of them and every kind of neighbourhood."""
    torch.manual_seed(0)
    key = (seeds_of(5, 2**64 - 7), torch.tensor([9, 2**31 - 1]).int(), torch.tensor([0, 2]).int())
    for purpose in (TARGET_NOISE, 1):
        whole = gumbel_noise(*key, 5003, purpose)
        for ids in (torch.arange(5003).int(), torch.tensor([5002]), some_ids(4097, 5003)):
            assert torch.equal(gumbel_noise_at(*key, ids, purpose), whole[:, ids.long()])


@jit
def _both_noises_kernel(seeds, position, choice, ids, whole, some, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(whole + at, gumbel_block(seeds, tl.load(position), tl.load(choice), 0, PURPOSE, BLOCK))
    tl.store(some + at, gumbel_at(seeds, tl.load(position), tl.load(choice), tl.load(ids + at), PURPOSE))


@needs_triton
@pytest.mark.parametrize("purpose", [TARGET_NOISE, 1])
def test_noise_of_some_tokens_is_theirs_inside_a_kernel(purpose: int) -> None:
    torch.manual_seed(0)
    seeds, ids = torch.randint(-(2**31), 2**31, (1, 2)).int(), torch.randperm(4096).int()
    position, choice = torch.tensor([2**31 - 5]).int(), torch.tensor([3]).int()
    whole, some = torch.empty(2, 4096)
    with quietly_interpreted():
        _both_noises_kernel[(1,)](seeds, position, choice, ids, whole, some, PURPOSE=purpose, BLOCK=4096)
    assert torch.equal(some, whole[ids.long()])


@BOTH
def test_ties_between_tokens_go_to_the_lowest(as_kernel: bool) -> None:
    """Also where the tokens are in different blocks."""
    args = draw_args(torch.ones(3, 9000).index_fill_(1, torch.arange(2500), 0.0), False)
    args["target_ids"] = 3 * torch.arange(9000, dtype=torch.int32) + 1
    assert run(args, as_kernel)[0].tolist() == [7501] * 3


@BOTH
def test_a_drafter_that_knows_the_likely_tokens_draws_the_targets(as_kernel: bool) -> None:
    """With the target's logits and noise, wherever the target's token is one that the drafter has."""
    torch.manual_seed(6)
    n = 40 if as_kernel else 2000
    likely = (3.0 * torch.randn(3000)).sort(descending=True)
    logits = torch.empty(3000).scatter_(0, torch.randperm(3000), likely.values).repeat(n, 1)
    target_ids = logits[0].topk(1000).indices.sort().values.int()
    args = draw_args(logits, noise=True)
    args["temperature"].fill_(1.3)
    of_target, _ = run(args, as_kernel)
    of_drafter, _ = run({**args, "logits": logits[:, target_ids.long()], "target_ids": target_ids}, as_kernel)
    known = torch.isin(of_target, target_ids)
    assert 0.8 < known.double().mean() < 1
    assert len(set(of_target.tolist())) > 20
    assert torch.equal(of_drafter[known], of_target[known])


@BOTH
@pytest.mark.parametrize("noise", [False, True])
def test_a_draft_is_a_draw_that_goes_where_it_is_wanted(noise: bool, as_kernel: bool) -> None:
    torch.manual_seed(8)
    args = {**reduced_draw_args(9, 4097, 5000, noise), "purpose": 1}
    token_ids, failed = run(args, as_kernel)
    assert failed.tolist() == [False, True, True, True, *[False] * 5]
    wanted = draft_args(args, 4, 2, keeps=True)
    given, ids, kept = wanted["logits"].tensor, wanted["draft_ids"]._base, wanted["kept_logits"]._base
    before = ids.clone(), kept.clone()
    arguments = bundle(draw_drafts, {**wanted, "logits": given})
    if as_kernel:
        with quietly_interpreted(), poisoned_allocations():
            draw_drafts.body(**arguments)
    else:
        draw_drafts(**arguments)
    before[0][:, 2] = torch.where(failed, -1, token_ids)
    before[1][args["batch_rows"].long(), 2] = given
    assert torch.equal(ids, before[0])
    torch.testing.assert_close(kept, before[1], rtol=0, atol=0, equal_nan=True)
