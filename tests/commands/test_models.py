from __future__ import annotations

import json
from pathlib import Path

from slipstream.checkpoints.hub import ALIASES, DEFAULT_MODEL
from tests.commands.run_cli import RunCli


def test_listing(cli: RunCli, empty_cache: Path) -> None:
    outcome = cli("models")
    assert outcome.code == 0
    assert outcome.err == ""
    assert DEFAULT_MODEL in outcome.out
    assert str(empty_cache) in outcome.out


def test_json(cli: RunCli, empty_cache: Path) -> None:
    (empty_cache / "own").mkdir(parents=True)
    (empty_cache / "own" / "mine.gguf").write_bytes(b"GGUF")
    listing = json.loads(cli("models", "--json").out)
    models = {model["name"]: model for model in listing["models"]}
    assert listing["cache"] == str(empty_cache)
    assert models[DEFAULT_MODEL]["cached"] is False
    assert models[DEFAULT_MODEL]["size"] == ALIASES[DEFAULT_MODEL].source.fingerprint.size
    assert models["mine"]["path"] == str(empty_cache / "own" / "mine.gguf")
