"""Products for ``--exact``: a token's row is the same, to the bit, whatever is multiplied with it, in any tiles."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.linear import exact_linear as module
from slipstream.kernels.linear.exact_linear import (
    SQUARE_UNIT,
    Tokens,
    exact_linear,
    exact_linear_scaled,
    in_units,
    launch_tile,
)
from slipstream.kernels.linear.exact_tiles import Cut, cut_of, keeps_cut
from slipstream.kernels.linear.small_linear import Epilogue, Tile, small_linear
from tests.kernels.order_revealing import InterpreterError, order_revealed
from tests.kernels.triton_cases_exact import integers
from tests.kernels.triton_check import quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
NUM_TOKENS = 70  # enough for the tiles of prompts


class Drawn(NamedTuple):
    tokens: Tokens
    weight: Tensor
    end: Epilogue
    wide: bool

    def some(self, rows: slice) -> Drawn:
        x, squares, eps = self.tokens
        own = None if self.end.residual is None else self.end.residual[rows]
        tokens = Tokens(x[rows], None if squares is None else squares[rows], eps)
        return self._replace(tokens=tokens, end=self.end._replace(residual=own))

    def run(self) -> tuple[Tensor, ...]:
        """The result; where a norm follows also its inputs, sums of squares added up."""
        if self.end.gain is None:
            return (exact_linear.body(*self),)
        out, scaled, squares = exact_linear_scaled.body(self.tokens, self.weight, self.end)
        return out, scaled, squares.sum(1)


def draw(kind: str, in_size: int, dtype: torch.dtype = torch.float16, num_tokens: int = NUM_TOKENS) -> Drawn:
    out_size = 40
    num_rows = 2 * out_size if kind == "gated" else out_size
    x = torch.randn(num_tokens, in_size, dtype=dtype)
    weight = (torch.randn(num_rows, in_size) / in_size**0.5).to(dtype)
    bias, residual = torch.randn(num_rows, dtype=dtype), torch.randn(num_tokens, out_size, dtype=dtype)
    squares = integers(x.float().square().sum(1, keepdim=True) * torch.tensor([0.3, 0.7]))
    if kind == "add":
        return Drawn(Tokens(x), weight, Epilogue(bias, residual, torch.randn(out_size, dtype=dtype)), False)
    if kind == "head":
        return Drawn(Tokens(x), weight, Epilogue(), True)
    return Drawn(Tokens(x, squares, 1e-5), weight, Epilogue(bias, activation="silu" if kind == "gated" else ""), False)


def check_rows(drawn: Drawn, ranges: list[slice]) -> None:
    with order_revealed():
        together = drawn.run()
        for rows in ranges:
            for whole, own in zip(together, drawn.some(rows).run(), strict=True):
                assert torch.equal(whole[rows], own), f"rows {rows.start} to {rows.stop}"


@needs_triton
@pytest.mark.parametrize("in_size", [100, 576, 2100])
@pytest.mark.parametrize("kind", ["norm", "gated", "add", "head"])
def test_a_row_does_not_depend_on_the_others(kind: str, in_size: int) -> None:
    rng = random.Random(f"{kind} {in_size}")
    counts = [1, rng.randrange(2, 9), rng.randrange(9, 17), rng.randrange(17, 65)]
    firsts = [rng.randrange(NUM_TOKENS - count) for count in counts]
    check_rows(draw(kind, in_size), [slice(first, first + n) for first, n in zip(firsts, counts, strict=True)])


@needs_triton
def test_nor_in_float32() -> None:
    check_rows(draw("gated", 300, torch.float32), [slice(3, 4), slice(10, 27)])


TILES = (
    *(Tile(8, 16, 0, 4, 1), Tile(16, 16, 0, 4, 1), Tile(8, 32, 0, 4, 1)),
    *(
        Tile(8, 16, 32, 1, 2),
        Tile(16, 64, 64, 4, 2, ahead=0, late=True),
        Tile(64, 16, 128, 4, 3),
        Tile(8, 128, 16, 8, 1),
    ),
)


@needs_triton
@pytest.mark.parametrize("kind", ["gated", "add"])
def test_every_tile_of_a_cut_gives_the_same(kind: str) -> None:
    drawn, cut = draw(kind, 576, num_tokens=5), cut_of(576)
    assert all(keeps_cut(tile, cut) for tile in TILES)
    with order_revealed():
        made = [launch_tile(*drawn, cut, tile) for tile in TILES]
    for other in made[1:]:
        assert torch.equal(made[0].out, other.out)
        if made[0].scaled is not None:
            assert made[0].squares is not None and other.scaled is not None and other.squares is not None
            assert torch.equal(made[0].scaled, other.scaled)
            assert torch.equal(made[0].squares.sum(1), other.squares.sum(1))


def by_tokens(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool) -> tuple[Cut, Tile]:
    """The fault: a long sum is cut where there are few tokens, as products that want many programs do."""
    size = tokens.x.shape[1]
    return (Cut(4, size // 4) if tokens.x.shape[0] < 9 else Cut(1, size)), Tile(16, 16, 16, 4, 2)


@needs_triton
def test_a_cut_by_the_number_of_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw("head", 576)
    monkeypatch.setattr(module, "choose_tile", by_tokens)
    with pytest.raises(AssertionError, match="rows 3 to 4"):
        check_rows(drawn, [slice(3, 4)])


@needs_triton
def test_a_sum_in_the_order_of_a_layout_is_found() -> None:
    drawn = draw("head", 100)
    with order_revealed(), pytest.raises(InterpreterError, match="depends on the layout"):
        small_linear(drawn.tokens.x[:1], drawn.weight, Epilogue(), Tile(0, 4, 0, 4, 1))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_of_squares_are_those_of_the_result(dtype: torch.dtype) -> None:
    drawn = draw("add", 300, dtype)
    with quietly_interpreted():
        out, scaled, squares = exact_linear_scaled.body(drawn.tokens, drawn.weight, drawn.end)
    assert torch.equal(squares.sum(1), in_units(out.float().square()).sum(1))
    assert drawn.end.gain is not None
    torch.testing.assert_close(scaled, out * drawn.end.gain, rtol=1e-3, atol=1e-3)
    expected = out.double().square().sum(1)
    torch.testing.assert_close(squares.sum(1).double() * SQUARE_UNIT, expected, rtol=1e-6, atol=40 * SQUARE_UNIT)


@needs_triton
@pytest.mark.parametrize("scale", [1e-3, 1.0, 2e3])
def test_a_norm_of_small_and_of_large_numbers(scale: float) -> None:
    """The factor of a norm with an eps as models have it, from integers: as from the numbers themselves."""
    stream = (scale * torch.randn(64, 2048)).to(torch.bfloat16)
    squares = in_units(stream.float().square()).sum(1)
    factor = torch.rsqrt(squares.float() * SQUARE_UNIT / 2048 + 1e-6)
    expected = torch.rsqrt(stream.double().square().mean(1) + 1e-6)
    torch.testing.assert_close(factor.double(), expected, rtol=1e-4, atol=0.0)


def test_definition_without_triton() -> None:
    drawn = draw("gated", 96, torch.float32)
    gate, value = _plain(drawn).chunk(2, dim=1)
    torch.testing.assert_close(exact_linear(*drawn), torch.nn.functional.silu(gate) * value, rtol=1e-4, atol=1e-4)
    drawn = draw("add", 96, torch.float32)
    out, scaled, squares = exact_linear_scaled(drawn.tokens, drawn.weight, drawn.end)
    assert drawn.end.residual is not None and drawn.end.gain is not None
    torch.testing.assert_close(out, _plain(drawn) + drawn.end.residual, rtol=1e-4, atol=1e-4)
    assert squares.shape == (NUM_TOKENS, 1) and torch.equal(scaled, out * drawn.end.gain)


def _plain(drawn: Drawn) -> Tensor:
    x, squares, eps = drawn.tokens
    product: Callable[..., Any] = torch.nn.functional.linear
    if squares is not None:
        x = x * torch.rsqrt(squares.sum(1, keepdim=True) * SQUARE_UNIT / x.shape[1] + eps)
    made: Tensor = product(x, drawn.weight, drawn.end.bias)
    return made
