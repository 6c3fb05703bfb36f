from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.data import Source, _texts_of
from slipstream.train.settings import TrainSettings
from slipstream.train.store import write_store
from slipstream.train.text_generation import GeneratedText


def test_texts_one_after_another() -> None:
    written = [
        GeneratedText(np.array([1, 2, 3], dtype=np.int32), 0, 2, False),
        GeneratedText(np.array([4, 5, 6, 7], dtype=np.int32), 1, 3, True),
    ]
    texts = _texts_of(written)
    assert texts.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7] and texts.token_ids.dtype is torch.int32
    assert texts.lengths.tolist() == [3, 4] and texts.tokens_of(1).tolist() == [4, 5, 6, 7]
    assert texts.learn_from.tolist() == [0, 1] and texts.answer_from.tolist() == [2, 3]
    assert texts.where(True).tolist() == [1]
    for few in ([], written[:1], written[1:]):
        with pytest.raises(ConfigError, match="the target generated almost nothing"):
            _texts_of(few)


def test_texts_of_another_recipe_are_not_taken_for_ours(tmp_path: Path) -> None:
    settings, path = TrainSettings(out=str(tmp_path)), tmp_path / "data.safetensors"
    write_store(path, {"token_ids": torch.zeros(1)}, settings.data_settings())
    with pytest.raises(ConfigError, match=r"data\.safetensors was written by another version"):
        Source(settings, path).read()
