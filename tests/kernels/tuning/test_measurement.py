"""The tuner's own arithmetic; that it measures well is for a GPU to show."""

from __future__ import annotations

import types

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.tuning import measurement as tuning
from slipstream.kernels.tuning.tiles import Kind, Weight
from tests.kernels.triton_check import quietly_interpreted


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("kind", ["norm", "gated", "add", "plain", "head"])
def test_a_right_tile_is_right_and_a_wrong_one_is_not(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setattr(
        torch, "randn", lambda shape, **_: torch.testing.make_tensor(shape, dtype=torch.float32, device="cpu")
    )
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, 0.5))
    weight = Weight(kind, 48, 64, 2)
    bench = tuning.Bench(weight, 3, torch.float32, max_copies=1)
    tile = list(tuning.candidates(weight, 3))[-1]._replace(columns=64, rows=16, tokens=8)
    with quietly_interpreted():
        assert bench.is_right(tile)
        monkeypatch.setattr(bench, "fused", lambda tile, matrix: bench.expected() * 1.1)
        assert not bench.is_right(tile)


def test_weights_with_known_tiles_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [Weight("plain", 48, 64, 2), Weight("add", 64, 48, 2), Weight("add", 64, 80, 2)]
    known = {weights[1].name: Tile(8, 64, 32, 2, 3)}
    seen: list[list[Tile]] = []

    def microseconds(self: object, tiles: list[Tile]) -> float:
        seen.append([*tiles])
        return sum(tile.rows for tile in tiles)

    bench = object.__new__(tuning.LayerBench)
    bench._benches = [types.SimpleNamespace(is_right=lambda tile: True)] * 3  # type: ignore[list-item]
    monkeypatch.setattr(tuning.LayerBench, "microseconds", microseconds)
    best = bench.best(weights, 4, known)
    assert all(tiles[1] == known[weights[1].name] for tiles in seen)
    assert best[1] == known[weights[1].name]
    for j in (0, 2):
        assert best[j].rows == min(tile.rows for tile in tuning.candidates(weights[j], 4))
