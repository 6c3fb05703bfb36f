"""A tiny model in a folder, an empty cache, and the command line to call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_models
from tests.commands.run_cli import RunCli, make_runner


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a byte-level tokenizer (one token a character) and a context of 512 tokens."""
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("models") / "Tiny-Llama")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    return make_runner(capsys, monkeypatch)
