from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.data import Source, _held_out
from slipstream.train.settings import TrainSettings
from slipstream.train.store import write_store


def test_nothing_that_is_asked_twice_is_held_out() -> None:
    turns = [f"turn {i}" for i in range(64)]
    held = _held_out(turns)
    assert [i for i, flag in enumerate(held) if flag] == [8, 24, 40, 56]
    turns[60] = turns[24]
    assert [i for i, flag in enumerate(_held_out(turns)) if flag] == [8, 40, 56]
    assert sum(_held_out([str(i) for i in range(40_000)])) == 96


def test_texts_of_another_recipe_are_not_taken_for_ours(tmp_path: Path) -> None:
    settings, path = TrainSettings(out=str(tmp_path)), tmp_path / "data.safetensors"
    write_store(path, {"token_ids": torch.zeros(1)}, settings.of_data())
    with pytest.raises(ConfigError, match=r"data\.safetensors was written by another version"):
        Source(settings, path).read()
