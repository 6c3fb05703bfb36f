"""Every program in ``examples/`` is short and runs; that of a client in ``tests/server/test_example_client.py``."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from slipstream.speculate import registry
from tests import tiny_models
from tests.train.conftest import build_target

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
MAX_LINES = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough for seconds, with layers enough for a head."""
    return tiny_models.save(build_target(), tmp_path_factory.mktemp("target"))


def run_example(name: str, *arguments: object, patch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES
    assert f"`python examples/{path.name}`" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_offline_batch(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("offline_batch", "--model", model, "--max-tokens", 4, patch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.endswith("?")) == "What is the capital of France?"


def test_async_stream(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("async_stream", "--model", model, "--max-tokens", 12, patch=monkeypatch)
    shown = capsys.readouterr().out
    assert "robot ended with" in shown and "river ended with" in shown and "clock ended with" in shown


def test_embeddings(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("embeddings", "--model", model, patch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    nearness = [float(line.split()[0]) for line in lines]
    assert len(lines) == 4 and nearness == sorted(nearness, reverse=True) and -1 <= nearness[-1] < nearness[0] <= 1


def test_own_drafter(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    run_example("own_drafter", "--model", model, "--max-tokens", 24, patch=monkeypatch)
    found = re.search(r"^(\d+) of (\d+) drafts accepted$", capsys.readouterr().out, re.MULTILINE)
    assert found and 0 < int(found[1]) <= int(found[2])


def test_train_head(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--steps", 2, "--sequences", 48, "--max-len", 160, "--draft-vocab", 64)
    run_example("train_head", "--model", model, "--out", tmp_path / "head", *small, patch=monkeypatch)
    assert "tokens a step" in capsys.readouterr().out
    assert (tmp_path / "head" / "model.safetensors").exists()
