"""Which tile a product gets: what was measured for these kernels, and nothing that was measured for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.tuning import tiles
from slipstream.kernels.tuning.measurement import candidates
from slipstream.kernels.tuning.tiles import MEASURED_TOKENS, Measured, Weight, default_tile, read_table, write_table

QKV, OUT = Weight("norm", 960, 576, 2), Weight("add", 576, 576, 2)
VERSIONS = {"triton": "3.6.0", "kernels": "abc"}
TABLE = {
    QKV.name: {1: Measured(Tile(0, 4, 0, 4, 1), 1.5, 5.0), 8: Measured(Tile(8, 16, 128, 1, 5, late=True), 2.7, 5.4)}
}


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpu.json"
    write_table(path, "Some GPU", TABLE, VERSIONS)
    assert read_table(path, VERSIONS) == TABLE
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"versions": {"triton": "3.6.0", "kernels": "abc"}}', "\x00"])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    assert read_table(path, VERSIONS) == {}
    assert read_table(tmp_path / "missing.json", VERSIONS) == {}


def test_measurements_of_other_kernels_do_not_count(tmp_path: Path) -> None:
    write_table(tmp_path / "gpu.json", "Some GPU", TABLE, {**VERSIONS, "kernels": "older"})
    assert read_table(tmp_path / "gpu.json", VERSIONS) == {}


def test_the_smallest_size_that_holds_the_tokens() -> None:
    found = [tiles._found(TABLE, QKV, n) for n in (1, 2, 8, 9)]
    assert found == [TABLE[QKV.name][1], TABLE[QKV.name][8], TABLE[QKV.name][8], None]
    assert tiles._found(TABLE, OUT, 1) is None


def measured(us: list[float], plain_us: list[float]) -> dict[int, Measured]:
    tile = Tile(8, 16, 128, 1, 5)
    return {n: Measured(tile, a, b) for n, a, b in zip(MEASURED_TOKENS, us, plain_us, strict=True)}


def test_a_layer_is_fused_up_to_where_its_products_together_are_faster() -> None:
    flat = [5.0] * len(MEASURED_TOKENS)
    table = {
        QKV.name: measured([1, 1, 1, 1, 2, 4, 7, 9, 9], flat),
        OUT.name: measured([1, 1, 1, 1, 2, 4, 2, 9, 9], flat),
    }
    assert tiles.max_fused(table, (QKV, OUT)) == 32
    assert tiles.max_fused(table, (QKV,)) == 16
    # A product that is added to the residual stream may be cuBLAS's, with a launch more.
    slow = {**table, OUT.name: measured([1, 1, 1, 1, 2, 9, 9, 9, 9], [5.0] * 6 + [0.5] * 3)}
    assert tiles.max_fused(slow, (QKV, OUT)) == 8
    slow[OUT.name] = measured([1, 1, 1, 1, 2, 9, 9, 9, 9], [5.0, 5.0, 5.0, 5.0, 5.0, 4.0, 0.1, 0.1, 0.1])
    assert tiles.max_fused({**slow, QKV.name: measured([1] * len(MEASURED_TOKENS), flat)}, (QKV, OUT)) == 128
    # By rule where a weight was not measured: short rows always, long ones with few tokens.
    assert tiles.max_fused(table, (QKV, OUT, Weight("add", 576, 1536, 2))) == 128
    assert tiles.max_fused(table, (QKV, Weight("add", 4096, 14336, 2))) == 16
    assert tiles.max_fused_tokens(torch.zeros(1), (QKV,)) == 0


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        *(("norm", 960, 576), ("add", 576, 1536), ("gated", 14336, 4096), ("head", 49152, 576)),
        *(("plain", 6144, 8192), ("plain", 4096, 12288), ("plain", 576, 1728), ("head", 32000, 4096)),
    ],
)
def test_every_tile_can_be_had(shape: tuple[str, int, int], width: int) -> None:
    """Powers of two, and stages that fit the shared memory of the smallest GPU in use with room to spare."""
    weight = Weight(*shape, width)  # type: ignore[arg-type]
    for num_tokens in range(1, 129):
        tile = default_tile(weight, num_tokens)
        sides = [tile.rows] if tile.tokens == 0 else [tile.tokens, tile.rows, tile.columns]
        assert all(side & (side - 1) == 0 and side >= 2 for side in sides)
        rows = tile.rows * (2 if weight.kind == "gated" else 1)
        held = tile.num_stages * tile.columns * (rows + tile.tokens) * width
        assert held <= 227 * 1024


def test_candidates_are_different_tiles() -> None:
    for weight in (QKV, Weight("add", 4096, 14336, 2), Weight("head", 128256, 4096, 2)):
        for num_tokens in MEASURED_TOKENS:
            found = list(candidates(weight, num_tokens))
            assert len(found) == len(set(found)) >= 4


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
def test_what_comes_with_the_package_is_for_these_kernels() -> None:
    shipped = sorted((Path(tiles.__file__).parent / "tuned").glob("*.json"))
    assert shipped
    for path in shipped:
        assert read_table(path, tiles.versions()), f"{path.name} was measured with other kernels: run slipstream tune"
