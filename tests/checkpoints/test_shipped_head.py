"""The draft head that comes with the package: who gets it, and who does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoints import hub
from slipstream.checkpoints.hub import ALIASES, DEFAULT_MODEL, shipped_head, with_shipped_head
from slipstream.config import EngineOptions


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for the default model that replaces the package's own."""
    name = ALIASES[DEFAULT_MODEL].head
    assert name is not None
    folder = tmp_path / "heads" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    monkeypatch.setattr(hub, "_HEADS", tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    return folder


# What the options say, and who gets our head: the library and the commands that answer; a benchmark.
SAID: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "nothing": ({}, True, False),
    "how far": ({"k": 2}, True, False),
    "a head, not which": ({"speculate": "eagle3"}, True, True),
    "which head": ({"speculate": "eagle3", "draft_model": "other"}, False, False),
    "another method": ({"speculate": "ngram"}, False, False),
    "none": ({"speculate": "none"}, False, False),
    "vLLM's spelling": ({"speculative_config": {"method": "ngram"}}, False, False),
    "another model": ({"model": "org/other"}, False, False),
    "steps without room for a draft": ({"max_num_seqs": 8, "max_num_batched_tokens": 15}, False, False),
    "steps with room for one": ({"max_num_seqs": 8, "max_num_batched_tokens": 16}, True, False),
    "steps without room for the usual requests": ({"max_num_batched_tokens": 300}, False, False),
    "steps without room, and how far": ({"max_num_seqs": 8, "max_num_batched_tokens": 8, "k": 1}, True, False),
    "the default model in capitals": ({"model": DEFAULT_MODEL.upper()}, True, False),
}


@pytest.mark.parametrize(("arguments", "by_answer", "by_bench"), SAID.values(), ids=list(SAID))
def test_who_gets_it(head: Path, arguments: dict[str, Any], by_answer: bool, by_bench: bool) -> None:
    options = EngineOptions(**{"model": DEFAULT_MODEL, **arguments})
    for by_default, expected in ((True, by_answer), (False, by_bench)):
        found = with_shipped_head(options, by_default=by_default)
        assert (found.draft_model == str(head)) == expected
        if expected:
            assert (found.speculate, found.k) == ("eagle3", options.k)
        else:
            assert found == options


def test_a_folder_of_that_name_is_another_model(head: Path, tmp_path: Path) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "config.json").write_text("{}")
    assert shipped_head(DEFAULT_MODEL) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_without_the_files_there_is_none(head: Path, name: str) -> None:
    (head / name).unlink()
    options = EngineOptions(model=DEFAULT_MODEL)
    assert with_shipped_head(options, by_default=True) == options
