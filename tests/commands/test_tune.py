"""``slipstream tune`` without a GPU, with a model it has no table for, and with measurements that are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.commands import tune
from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.tuning.tiles import MEASURED_TOKENS, Measured, Weight, read_table, versions, write_table
from tests import tiny_models
from tests.commands.run_cli import RunCli, assert_one_line_error

ONE = Measured(Tile(8, 16, 64, 1, 4), 1.0, 2.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU by name, that measures the same for everything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(tune, "compile_all", _nothing)
    monkeypatch.setattr(tune, "measure", lambda weight, tokens, dtype: ONE)
    monkeypatch.setattr(
        tune, "measure_layer", lambda weights, *rest: {w.name: ONE for w in weights if w.name not in rest[-1]}
    )


def _nothing(weight: Weight, num_tokens: int, dtype: torch.dtype) -> None:
    pass


def test_without_a_gpu(cli: RunCli) -> None:
    assert_one_line_error(cli("tune", "llama-3.1-8b"), "there is none here")


@pytest.mark.usefixtures("gpu")
def test_a_model_with_experts(cli: RunCli, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("mixtral"), tmp_path)
    assert_one_line_error(cli("tune", str(folder)), "has experts")


@pytest.mark.usefixtures("gpu")
def test_what_was_measured_joins_what_is_there(cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for shape in ("smollm2-135m", "llama-3.1-8b"):
        assert cli("tune", shape, "--output", str(path), "--jobs", "1").code == 0
    found = read_table(path, versions())
    assert {"norm 960x576 16 bits", "gated 14336x4096 16 bits", "head 128256x4096 16 bits"} <= found.keys()
    assert len(found) == 10
    assert all(list(sizes) == list(MEASURED_TOKENS) for sizes in found.values())
    assert json.loads(path.read_text())["gpu"] == "Some GPU"


HEAD = {"plain 6144x8192 16 bits", "plain 4096x12288 16 bits", "head 32000x4096 16 bits"}
SHARED = {"add 4096x4096 16 bits", "gated 14336x4096 16 bits", "add 4096x14336 16 bits"}


@pytest.mark.usefixtures("gpu")
def test_a_head_keeps_what_was_measured_for_its_target(cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    shapes = ("llama-3.1-8b", "--head", "llama-3.1-8b-eagle3", "--output", str(path), "--jobs", "1")
    # Nothing is known of the target: what both multiply with is measured between the head's products.
    assert cli("tune", *shapes).code == 0
    assert read_table(path, versions()).keys() == HEAD | SHARED
    older = ONE._replace(us=0.5)
    before = {name: dict.fromkeys(MEASURED_TOKENS, older) for name in SHARED | {"add 1x1 16 bits"}}
    write_table(path, "Some GPU", before, versions())
    assert cli("tune", *shapes).code == 0
    found = read_table(path, versions())
    assert found.keys() == HEAD | before.keys()
    assert all(found[name] == sizes for name, sizes in before.items())
    assert all(found[name] == dict.fromkeys(MEASURED_TOKENS, ONE) for name in HEAD)


@pytest.mark.usefixtures("gpu")
def test_a_head_that_is_not_there(cli: RunCli, tmp_path: Path) -> None:
    result = cli("tune", "llama-3.1-8b", "--head", str(tmp_path / "nowhere"))
    assert_one_line_error(result, "nowhere")
